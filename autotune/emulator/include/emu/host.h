// The part of the CUDA runtime API that TileLang's host wrapper calls. Launches of clusters and cooperative ones are
// refused by rewrite.py, by name; streams and hints are taken and ignored.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <tuple>

#include "emu/abi.h"
#include "emu/vectors.h"

enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorLaunchFailure = 719 };

typedef struct CUstream_st *cudaStream_t;
static constexpr cudaStream_t cudaStreamDefault = nullptr;

enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };
enum cudaLaunchAttributeID { cudaLaunchAttributeProgrammaticStreamSerialization = 6 };

struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  struct {
    int programmaticStreamSerializationAllowed;
  } val;
};

struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute *attrs;
  unsigned numAttrs;
};

namespace emu {

inline cudaError_t last_error = cudaSuccess;

// 227 KB is the most of any architecture; what this one has is checked at the launch.
inline cudaError_t set_function_attribute(cudaFuncAttribute, int value) {
  return value < 0 || value > 227 * 1024 ? cudaErrorInvalidValue : cudaSuccess;
}

// Arguments are converted to the kernel's parameter types and kept; every thread calls the kernel with copies.
template <class... Parameters>
struct Call {
  void (*kernel)(Parameters...);
  std::tuple<Parameters...> arguments;

  EMU_UNCHECKED static void run(void *call) {
    static_cast<Call *>(call)->run(std::index_sequence_for<Parameters...>());
  }
  template <size_t... I>
  EMU_UNCHECKED void run(std::index_sequence<I...>) {
    kernel(std::get<I>(arguments)...);
  }
};

template <class... Parameters, class... Arguments>
cudaError_t launch(const char *name, const cudaLaunchConfig_t *config, void (*kernel)(Parameters...),
                   const Arguments &...arguments) {
  using KernelCall = Call<Parameters...>;
  KernelCall call{kernel, std::tuple<Parameters...>(static_cast<Parameters>(arguments)...)};
  unsigned grid[3] = {config->gridDim.x, config->gridDim.y, config->gridDim.z};
  unsigned block[3] = {config->blockDim.x, config->blockDim.y, config->blockDim.z};
  int failed = emu_launch(name, grid, block, config->dynamicSmemBytes, KernelCall::run, &call);
  if (failed) last_error = cudaErrorLaunchFailure;
  return last_error;
}

}  // namespace emu

#define cudaLaunchKernelEx(config, kernel, ...) emu::launch(#kernel, config, kernel, ##__VA_ARGS__)
#define cudaFuncSetAttribute(kernel, attribute, value) emu::set_function_attribute(attribute, value)

inline cudaError_t cudaGetLastError() {
  cudaError_t error = emu::last_error;
  emu::last_error = cudaSuccess;
  return error;
}
inline const char *cudaGetErrorName(cudaError_t error) {
  switch (error) {
    case cudaSuccess: return "cudaSuccess";
    case cudaErrorInvalidValue: return "cudaErrorInvalidValue";
    case cudaErrorLaunchFailure: return "cudaErrorLaunchFailure";
  }
  return "unknown error";
}
inline const char *cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess: return "no error";
    case cudaErrorInvalidValue: return "invalid argument";
    case cudaErrorLaunchFailure: return "a finding ended the emulated launch";
  }
  return "unknown error";
}

#define TILELANG_CHECK(statement)                                                                        \
  do {                                                                                                   \
    cudaError_t error_ = (statement);                                                                    \
    if (error_ != cudaSuccess) {                                                                         \
      snprintf(error_buf, ERROR_BUF_SIZE, "%s - %s", cudaGetErrorName(error_), cudaGetErrorString(error_)); \
      return -1;                                                                                         \
    }                                                                                                    \
  } while (0)
#define TILELANG_CHECK_LAST_ERROR(kernel_name) TILELANG_CHECK(cudaGetLastError())

// ---- programmatic dependent launch: kernels run one after the other, so there is nothing to wait for

EMU_INLINE void cudaGridDependencySynchronize() {}
EMU_INLINE void cudaTriggerProgrammaticLaunchCompletion() {}

// ---- hints about the L2 cache

enum cudaLimit { cudaLimitPersistingL2CacheSize = 6 };
enum cudaAccessProperty { cudaAccessPropertyStreaming = 1, cudaAccessPropertyPersisting = 2 };
enum cudaStreamAttrID { cudaStreamAttributeAccessPolicyWindow = 1 };
struct cudaStreamAttrValue {
  struct {
    void *base_ptr;
    size_t num_bytes;
    float hitRatio;
    cudaAccessProperty hitProp, missProp;
  } accessPolicyWindow;
};
inline cudaError_t cudaDeviceGetLimit(size_t *value, cudaLimit) { return *value = 0, cudaSuccess; }
inline cudaError_t cudaDeviceSetLimit(cudaLimit, size_t) { return cudaSuccess; }
inline cudaError_t cudaStreamSetAttribute(cudaStream_t, cudaStreamAttrID, const cudaStreamAttrValue *) {
  return cudaSuccess;
}
inline cudaError_t cudaCtxResetPersistingL2Cache() { return cudaSuccess; }
