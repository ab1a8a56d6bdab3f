// Threads that compute together with the one that calls.
#pragma once

#include <cstdint>

namespace kvc {

// Calls `body(argument)` on this thread, and on up to `threads` in all, and returns when those have done that have begun:
// whoever comes late is not waited for, so `body` takes work as long as there is any.
void in_parallel(void (*body)(void*), void* argument, int64_t threads);

}  // namespace kvc
