"""One decode step as a kernel of its own for the cupy backend: CUDA C++, compiled by NVRTC on the device it meets.

    S += phi(k) v^T        z += phi(k)        o = scale phi(q)^T S / (scale phi(q) . z + eps)

A block serves one q/k head of one sequence and every value head of it, so that z has one writer. Its threads lie over
the state in groups: a group takes one row of [K, V] at a time, four columns a thread, so that a warp reads and writes
16-byte words side by side, and each thread has four of them in flight. Everything is fp32.

Source: Katharopoulos et al. 2020, arXiv 2006.16236, eq. 16-20.
"""

from typing import Any

import numpy as np
import torch

from linattn_tl.ops.linear_attention.definition import FEATURE_MAP_CODES, Options

KERNEL = "linear_attention_decode"
THREADS = 256
MAX_K = 4096  # both feature vectors in 32 KB of shared memory, which every GPU gives without asking
MAX_TOKENS = 8  # a launch each, and the state once to and fro: more of them go in chunks

SOURCE = r"""
__device__ __forceinline__ float phi(float x, int feature_map) {
  if (feature_map == 0) return x > 0.0f ? x + 1.0f : expf(x);
  if (feature_map == 1) return x < 0.0f ? 0.0f : x;
  return x;
}

// q, k [B, H, K], v and o [B, H * heads, V]; kv [P, H * heads, K, V] and z [P, H, K] by the strides of their rows and
// heads. slots [B], or null for row b of sequence b.
extern "C" __global__ void __launch_bounds__(256) linear_attention_decode(
    const float* __restrict__ q, const float* __restrict__ k, const float* __restrict__ v, float* __restrict__ o,
    float* __restrict__ kv, float* __restrict__ z, const long long* __restrict__ slots, int H, int heads, int K, int V,
    long long kv_row, long long kv_head, long long z_row, long long z_head, int feature_map, int normalize, float scale,
    float eps) {
  extern __shared__ float features[];  // scale phi(q) [K], phi(k) [K]
  __shared__ float4 partial[256];
  __shared__ float warp_sums[8];
  const int thread = threadIdx.x;
  const long long b = blockIdx.x / H;
  const int h = blockIdx.x % H;
  const int columns = V / 4;
  const int groups = 256 / columns;
  const int group = thread / columns;
  const int column = thread % columns;
  const long long row = slots ? slots[b] : b;
  const float4* v4 = (const float4*)v + (long long)blockIdx.x * heads * columns;
  float4* o4 = (float4*)o + (long long)blockIdx.x * heads * columns;
  if (row < 0) {  // padding
    for (int i = thread; i < heads * columns; i += 256) o4[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    return;
  }

  float weight = 0.0f;
  float* z_h = z + row * z_row + h * z_head;
  for (int i = thread; i < K; i += 256) {
    const float q_i = scale * phi(q[(long long)blockIdx.x * K + i], feature_map);
    const float k_i = phi(k[(long long)blockIdx.x * K + i], feature_map);
    const float z_i = z_h[i] + k_i;
    z_h[i] = z_i;
    features[i] = q_i;
    features[K + i] = k_i;
    weight += q_i * z_i;
  }
  for (int distance = 16; distance > 0; distance >>= 1) weight += __shfl_xor_sync(0xffffffffu, weight, distance);
  if (thread % 32 == 0) warp_sums[thread / 32] = weight;
  __syncthreads();
  float den = eps;
  for (int i = 0; i < 8; ++i) den += warp_sums[i];

  for (int j = 0; j < heads; ++j) {
    if (group < groups) {
      const float4 v_j = v4[j * columns + column];
      float4* state = (float4*)(kv + row * kv_row + (long long)(h * heads + j) * kv_head) + column;
      float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      for (int first = group; first < K; first += 4 * groups) {
        float4 s[4];
        #pragma unroll
        for (int u = 0; u < 4; ++u) {
          const int i = first + u * groups;
          if (i < K) s[u] = state[i * columns];
        }
        #pragma unroll
        for (int u = 0; u < 4; ++u) {
          const int i = first + u * groups;
          if (i < K) {
            const float q_i = features[i];
            const float k_i = features[K + i];
            s[u].x += k_i * v_j.x;
            s[u].y += k_i * v_j.y;
            s[u].z += k_i * v_j.z;
            s[u].w += k_i * v_j.w;
            state[i * columns] = s[u];
            sum.x += q_i * s[u].x;
            sum.y += q_i * s[u].y;
            sum.z += q_i * s[u].z;
            sum.w += q_i * s[u].w;
          }
        }
      }
      partial[thread] = sum;
    }
    __syncthreads();
    if (thread < columns) {
      float4 sum = partial[thread];
      for (int g = 1; g < groups; ++g) {
        const float4 more = partial[g * columns + thread];
        sum.x += more.x;
        sum.y += more.y;
        sum.z += more.z;
        sum.w += more.w;
      }
      if (normalize) {
        sum.x /= den;
        sum.y /= den;
        sum.z /= den;
        sum.w /= den;
      }
      o4[j * columns + thread] = sum;
    }
    __syncthreads();  // partial is written again for the next value head
  }
}
"""


def fits(q: torch.Tensor, v: torch.Tensor, kv: torch.Tensor, z: torch.Tensor) -> bool:
    """Whether the kernel can read and write the state as it lies: fp32, rows of 16-byte words."""
    n, K, V = q.shape[1], q.shape[3], v.shape[3]
    if kv.dtype != torch.float32 or n > MAX_TOKENS or not 0 < K <= MAX_K or V % 4 or not 0 < V <= 4 * THREADS:
        return False
    whole = kv.stride(3) == 1 and (kv.stride(2) == V or K == 1) and (z.stride(2) == 1 or K == 1)
    return whole and kv.stride(0) % 4 == 0 and kv.stride(1) % 4 == 0 and kv.data_ptr() % 16 == 0


def launch(
    kernel: Any, q: Any, k: Any, v: Any, kv: Any, z: Any, slots: Any, opt: Options, out: torch.Tensor
) -> torch.Tensor:
    """One launch a token, on the stream and device that are current for CuPy. q [B, n, H, K], checked by `fits`."""
    B, n, H, K = q.shape
    HV, V = v.shape[2:]
    q, k, v = (_token_first(x) for x in (q, k, v))
    o = torch.empty(n, B, HV, V, dtype=torch.float32, device=q.device)
    if slots is not None:
        slots = slots.to(torch.int64).contiguous()
    pool = (kv.data_ptr(), z.data_ptr(), 0 if slots is None else slots.data_ptr())
    sizes = [np.int32(x) for x in (H, HV // H, K, V)]
    strides = [np.int64(x) for x in (*kv.stride()[:2], *z.stride()[:2])]
    switches = (np.int32(FEATURE_MAP_CODES[opt.feature_map]), np.int32(opt.normalize))
    numbers = (np.float32(opt.scale), np.float32(opt.eps))
    for t in range(n):
        pointers = [np.uint64(x) for x in (*(y[t].data_ptr() for y in (q, k, v, o)), *pool)]
        kernel((B * H,), (THREADS,), (*pointers, *sizes, *strides, *switches, *numbers), shared_mem=8 * K)
    return out.copy_(o.transpose(0, 1))


def _token_first(x: torch.Tensor) -> torch.Tensor:
    """[B, n, H, D] -> [n, B, H, D] in fresh fp32, and so aligned."""
    return torch.empty(x.transpose(0, 1).shape, dtype=torch.float32, device=x.device).copy_(x.transpose(0, 1))
