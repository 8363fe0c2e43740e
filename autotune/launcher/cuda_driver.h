// What the launcher uses of the NVIDIA driver's API, as cuda.h of the toolkit declares it. A test compares them.
#pragma once
#include <cstdint>

typedef int CUresult;
typedef int CUdevice;
typedef struct CUctx_st* CUcontext;
typedef struct CUmod_st* CUmodule;
typedef struct CUfunc_st* CUfunction;
typedef struct CUstream_st* CUstream;
typedef uint32_t cuuint32_t;
typedef uint64_t cuuint64_t;

struct alignas(128) CUtensorMap {  // 64 before CUDA 13
  cuuint64_t opaque[16];
};

struct CUlaunchAttribute {
  int id;
  char pad[4];
  union {
    char bytes[64];
    int programmaticStreamSerializationAllowed;
  } value;
};

struct CUlaunchConfig {
  unsigned gridDimX, gridDimY, gridDimZ, blockDimX, blockDimY, blockDimZ, sharedMemBytes;
  CUstream hStream;
  CUlaunchAttribute* attrs;
  unsigned numAttrs;
};

constexpr CUresult CUDA_SUCCESS = 0;

// TileLang's code casts integers to these.
enum CUtensorMapDataType : int {};
enum CUtensorMapInterleave : int {};
enum CUtensorMapSwizzle : int {};
enum CUtensorMapL2promotion : int {};
enum CUtensorMapFloatOOBfill : int {};

namespace linattn {

constexpr CUresult INVALID_VALUE = 1, ILLEGAL_ADDRESS = 700, MISALIGNED_ADDRESS = 716, LAUNCH_FAILED = 719;
constexpr int PROGRAMMATIC_STREAM_SERIALIZATION = 6;                // CUlaunchAttributeID
constexpr int MAX_DYNAMIC_SHARED_SIZE_BYTES = 8;                    // CUfunction_attribute
constexpr int CAPABILITY_MAJOR = 75, CAPABILITY_MINOR = 76;         // CUdevice_attribute
constexpr int CAPTURE_MODE_RELAXED = 2, CAPTURE_STATUS_NONE = 0;    // CUstreamCaptureMode, CUstreamCaptureStatus

#define LINATTN_DRIVER(X)                                                                                            \
  X(cuInit, "cuInit", (unsigned))                                                                                    \
  X(cuDriverGetVersion, "cuDriverGetVersion", (int*))                                                                \
  X(cuGetErrorName, "cuGetErrorName", (CUresult, const char**))                                                      \
  X(cuGetErrorString, "cuGetErrorString", (CUresult, const char**))                                                  \
  X(cuDeviceGet, "cuDeviceGet", (CUdevice*, int))                                                                    \
  X(cuDeviceGetAttribute, "cuDeviceGetAttribute", (int*, int, CUdevice))                                             \
  X(cuDevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain", (CUcontext*, CUdevice))                                    \
  X(cuDevicePrimaryCtxRelease, "cuDevicePrimaryCtxRelease_v2", (CUdevice))                                           \
  X(cuCtxGetCurrent, "cuCtxGetCurrent", (CUcontext*))                                                                \
  X(cuCtxPushCurrent, "cuCtxPushCurrent_v2", (CUcontext))                                                            \
  X(cuCtxPopCurrent, "cuCtxPopCurrent_v2", (CUcontext*))                                                             \
  X(cuThreadExchangeStreamCaptureMode, "cuThreadExchangeStreamCaptureMode", (int*))                                  \
  X(cuStreamIsCapturing, "cuStreamIsCapturing", (CUstream, int*))                                                    \
  X(cuModuleLoadData, "cuModuleLoadData", (CUmodule*, const void*))                                                  \
  X(cuModuleUnload, "cuModuleUnload", (CUmodule))                                                                    \
  X(cuModuleGetFunction, "cuModuleGetFunction", (CUfunction*, CUmodule, const char*))                                \
  X(cuFuncSetAttribute, "cuFuncSetAttribute", (CUfunction, int, int))                                                \
  X(cuTensorMapEncodeTiled, "cuTensorMapEncodeTiled",                                                                \
    (CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*, const cuuint32_t*,  \
     const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill)) \
  X(cuLaunchKernelEx, "cuLaunchKernelEx", (const CUlaunchConfig*, CUfunction, void**, void**))

struct Driver {
#define LINATTN_ENTRY(name, symbol, parameters) CUresult(*name) parameters;
  LINATTN_DRIVER(LINATTN_ENTRY)
#undef LINATTN_ENTRY
};

}  // namespace linattn
