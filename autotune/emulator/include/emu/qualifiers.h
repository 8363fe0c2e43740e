// CUDA's function and variable qualifiers, and the attributes that the shims need.
#pragma once

#define __global__
#define __device__
#define __host__
#define __grid_constant__
#define __launch_bounds__(...)
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __align__(n) __attribute__((aligned(n)))

// A finding belongs to the line that an ABI call or a memory hook returns to. So whatever leads to one is inlined into
// the kernel; its line is then found through the chain of inlined calls.
#define EMU_INLINE inline __attribute__((always_inline))

// For what the runtime has checked already, or checks by itself: no hooks.
#define EMU_UNCHECKED __attribute__((noinline, no_sanitize("thread", "undefined")))

#define TL_DEVICE __forceinline__ __device__
#define TL_DEVICE_NOINLINE __noinline__ __device__
#define TL_PATCH
