// Which sanitizer a test is built for. They make everything many times slower, and look at accesses and their
// order, not at values: one shape of each kind and one run of each order is enough for them.
#pragma once

namespace minillm::test {

#if defined(__SANITIZE_THREAD__)
/// A fiber, which every thread of a kernel is, takes it a hundred times as long.
inline constexpr bool kThreadSanitized = true;
#else
inline constexpr bool kThreadSanitized = false;
#endif

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
inline constexpr bool kSanitized = true;
#else
inline constexpr bool kSanitized = false;
#endif

}  // namespace minillm::test
