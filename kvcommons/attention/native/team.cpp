// team.h on threads of our own. OpenMP's cannot be told while they run how long they are to stay awake, and each call waits
// for all of them: for those, too, that are still being woken, or from which somebody else has taken the core.
#include "team.h"

#include <initializer_list>
#include <linux/futex.h>
#include <new>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "clock.h"

namespace kvc {
namespace {

// Until somebody says otherwise: from one operation of a layer to the next, but not for an answer.
constexpr int64_t AWAKE_NS = 60000;
// Looks at what is waited for, until the core is offered to others, who may be those that are waited for.
constexpr unsigned LOOKS = 256;
// Where a core was away for so long between two looks, somebody else computes on it, and more than a token on its way
// through other processes: threads that wait do not stay awake then, for as long as CONTESTED_NS.
constexpr int64_t AWAY_NS = 2000000, CONTESTED_NS = 1000000000;
constexpr int FOLLOWERS_MAX = 255;

inline void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

struct Team;

struct Follower {
    Team* team;
    int number;
    pthread_t thread;
};

// A thread that leads, and those that follow it.
struct alignas(64) Team {
    // Of `state`: which call it is, from bit NUMBER on, how many more may begin with it, and how many are at it.
    static constexpr uint64_t AT_IT = 0xffff, PLACE = 0x10000, PLACES = 0xffff0000;
    static constexpr int NUMBER = 32;

    uint64_t state = 0;
    void (*body)(void*) = nullptr;
    void* argument = nullptr;
    // What sleepers wait for another value of.
    alignas(64) int32_t calls = 0;
    int32_t sleepers = 0, ended = 0;
    int64_t awake_ns = AWAKE_NS, contested_until = 0;
    int core = 0;  // the leader's, when all others slept
    pid_t leader = (pid_t)syscall(SYS_gettid), process = getpid();
    int count = 0, most = FOLLOWERS_MAX;
    int32_t crowded = 0;  // there are fewer cores than threads
    Follower followers[FOLLOWERS_MAX];

    void lead(void (*next)(void*), void* with, int others) {
        body = next;
        argument = with;
        if (__atomic_load_n(&sleepers, __ATOMIC_RELAXED) == count) __atomic_store_n(&core, sched_getcpu(), __ATOMIC_RELAXED);
        uint64_t number = (__atomic_load_n(&state, __ATOMIC_RELAXED) >> NUMBER) + 1;
        __atomic_store_n(&state, number << NUMBER | (uint64_t)others * PLACE, __ATOMIC_SEQ_CST);
        wake(others);
        next(with);
        __atomic_fetch_and(&state, ~PLACES, __ATOMIC_ACQ_REL);
        for (unsigned looks = 1; __atomic_load_n(&state, __ATOMIC_ACQUIRE) & AT_IT; looks++) {
            pause();
            if (looks % LOOKS == 0) sched_yield();
        }
    }

    // Whoever is about to sleep has either been counted by now, or sees the new number.
    void wake(int at_most) {
        __atomic_fetch_add(&calls, 1, __ATOMIC_SEQ_CST);
        if (__atomic_load_n(&sleepers, __ATOMIC_SEQ_CST))
            syscall(SYS_futex, &calls, FUTEX_WAKE_PRIVATE, at_most, nullptr, nullptr, 0);
    }

    void follow(int number) {
        uint64_t last = 0;
        unsigned looks = 0;
        take_core(number);
        int64_t since = now_ns(), looked = since;
        for (;;) {
            int32_t seen = __atomic_load_n(&calls, __ATOMIC_SEQ_CST);
            if (__atomic_load_n(&ended, __ATOMIC_ACQUIRE)) return;
            uint64_t now = __atomic_load_n(&state, __ATOMIC_SEQ_CST);
            if (now & PLACES && now >> NUMBER != last) {
                // Once it is at it, the call is not another one before it has left.
                if (!__atomic_compare_exchange_n(&state, &now, now - PLACE + 1, false, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED))
                    continue;
                last = now >> NUMBER;
                body(argument);
                __atomic_fetch_sub(&state, 1, __ATOMIC_RELEASE);
                since = looked = now_ns();
                continue;
            }
            pause();
            if (++looks % LOOKS) continue;
            sched_yield();
            if (int64_t before = looked; (looked = now_ns()) - before > AWAY_NS)
                __atomic_store_n(&contested_until, looked + CONTESTED_NS, __ATOMIC_RELAXED);
            if (looked - since < bearable_ns(looked)) continue;
            __atomic_fetch_add(&sleepers, 1, __ATOMIC_SEQ_CST);
            syscall(SYS_futex, &calls, FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
            __atomic_fetch_sub(&sleepers, 1, __ATOMIC_SEQ_CST);
            take_core(number);
            since = looked = now_ns();
        }
    }

    // How long to stay awake.
    int64_t bearable_ns(int64_t now) const {
        int64_t said = __atomic_load_n(&awake_ns, __ATOMIC_RELAXED);
        bool others = now < __atomic_load_n(&contested_until, __ATOMIC_RELAXED) || __atomic_load_n(&crowded, __ATOMIC_RELAXED);
        return others && said > AWAKE_NS ? AWAKE_NS : said;
    }

    // A kernel may wake threads that have slept on one core, as those of virtual machines do that let the other cores rest,
    // and they share it for tens of milliseconds. Only a team that has a thread for each core that its leader may use is
    // placed: which cores are left to a smaller one, others decide.
    void take_core(int number) {
        cpu_set_t usable, one;
        if (sched_getaffinity(leader, sizeof usable, &usable)) return;
        int threads = __atomic_load_n(&count, __ATOMIC_ACQUIRE) + 1;
        __atomic_store_n(&crowded, CPU_COUNT(&usable) < threads, __ATOMIC_RELAXED);
        if (CPU_COUNT(&usable) == threads) {
            CPU_ZERO(&one);
            CPU_CLR(__atomic_load_n(&core, __ATOMIC_RELAXED), &usable);
            for (int cpu = 0; cpu < CPU_SETSIZE; cpu++)
                if (CPU_ISSET(cpu, &usable) && number-- == 0) CPU_SET(cpu, &one);
            usable = one;
        }
        sched_setaffinity(0, sizeof usable, &usable);
    }

    static void* begin(void* argument) {
        Follower& follower = *(Follower*)argument;
        follower.team->follow(follower.number);
        return nullptr;
    }

    // As far as the system has threads for it. Signals are for the process's other threads, but for those that say that
    // one itself went wrong.
    void grow(int wanted) {
        if (wanted > most) wanted = most;
        if (wanted <= count) return;
        if (!count) core = sched_getcpu();
        sigset_t all, before;
        sigfillset(&all);
        for (int own : {SIGSEGV, SIGBUS, SIGFPE, SIGILL}) sigdelset(&all, own);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        int number = __atomic_exchange_n(&count, wanted, __ATOMIC_ACQ_REL);
        for (; number < wanted; number++) {
            followers[number] = Follower{this, number, {}};
            if (pthread_create(&followers[number].thread, nullptr, begin, &followers[number])) {
                __atomic_store_n(&count, most = number, __ATOMIC_RELEASE);
                break;
            }
            pthread_setname_np(followers[number].thread, "kvc-team");
        }
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
    }
};

// Of this thread; it ends with it.
thread_local Team* led = nullptr;
pthread_key_t ending;

void end(void* of_thread) {
    Team* team = (Team*)of_thread;
    led = nullptr;
    if (team->process != getpid()) return;  // forked: they are not here
    __atomic_store_n(&team->ended, 1, __ATOMIC_RELEASE);
    team->wake(FOLLOWERS_MAX);
    for (int number = 0; number < team->count; number++) pthread_join(team->followers[number].thread, nullptr);
    free(team);
}

// Null where there is no memory for it.
Team* team() {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, [] { pthread_key_create(&ending, end); });
    if (led) return led;
    void* memory = aligned_alloc(alignof(Team), sizeof(Team));
    if (!memory) return nullptr;
    led = new (memory) Team;
    pthread_setspecific(ending, led);
    return led;
}

}  // namespace

void in_parallel(void (*body)(void*), void* argument, int64_t threads) {
    int others = (int)(threads > FOLLOWERS_MAX ? FOLLOWERS_MAX : threads - 1);
    Team* here = others > 0 ? team() : nullptr;
    if (!here) return body(argument);
    here->grow(others);
    here->lead(body, argument, others);
}

}  // namespace kvc

#define EXPORTED extern "C" __attribute__((visibility("default")))

// So long the threads that compute with this one wait awake for its next call; then they sleep.
EXPORTED void kvc_keep_awake(int64_t nanoseconds) {
    if (kvc::Team* here = kvc::team()) __atomic_store_n(&here->awake_ns, nanoseconds, __ATOMIC_RELAXED);
}
