// Macros that depend on the compiler: code shared with CUDA, and functions compiled once per instruction level.
#pragma once

// TANDEM_HD marks a function that also runs on a GPU.
#if defined(__CUDACC__)
#define TANDEM_HD __host__ __device__
#else
#define TANDEM_HD
#endif

// TANDEM_CLONES compiles a function for three x86-64 levels and picks one when the program starts. It is empty under
// sanitizers, whose run time is not up yet when the resolver runs, and where the compiler lacks it.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(__CUDACC__) && \
    !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__) && !defined(TANDEM_NO_CLONES)
#define TANDEM_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define TANDEM_CLONES
#endif
