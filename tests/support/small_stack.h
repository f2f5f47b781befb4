// Runs a body on a thread with a small stack, where deep recursion would crash.
#pragma once
#include <pthread.h>

#include <algorithm>

namespace tandem::test {

template <class Body>
void on_small_stack(Body body) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  constexpr std::size_t kBytes = 1024 * 1024;  // sanitizers enlarge every frame
#else
  constexpr std::size_t kBytes = 128 * 1024;  // of which the thread-local data of the libraries takes a part
#endif
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  pthread_attr_setstacksize(&attributes, kBytes);
  pthread_t thread;
  auto call = [](void* argument) -> void* {
    (*static_cast<Body*>(argument))();
    return nullptr;
  };
  const int error = pthread_create(&thread, &attributes, call, &body);
  REQUIRE(error == 0);
  pthread_join(thread, nullptr);
  pthread_attr_destroy(&attributes);
}

}  // namespace tandem::test
