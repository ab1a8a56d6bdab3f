#pragma once

#include <cstdint>
#include <time.h>

namespace kvc {

// Python's time.monotonic.
inline int64_t now_ns() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

}  // namespace kvc
