// What a kernel's translation unit asks of the runtime: one C function an instruction, nothing inlined.
//
// The shims in include/ turn CUDA and TileLang names into these calls; runtime/*.cpp implements them. A function
// takes its own return address as the place in the generated source that its findings and counters belong to, so
// every shim in between must be always_inline. Addresses of shared memory are host pointers into the block's arena;
// emu_shared_address gives the 32-bit offset that descriptors hold.
#pragma once
#include <cstddef>
#include <cstdint>

// Element types, numbered as tl::DataType so that a template argument is passed on as it is.
enum EmuType : int {
  EMU_S8 = 2,
  EMU_U8 = 3,
  EMU_S32 = 6,
  EMU_E4M3 = 10,
  EMU_E5M2 = 11,
  EMU_F16 = 12,
  EMU_BF16 = 13,
  EMU_F32 = 15,
  EMU_TF32 = 16,
  EMU_F64 = 17,
};

extern "C" {
// ---- identity
unsigned emu_thread_index(int axis) __attribute__((pure));
unsigned emu_block_index(int axis) __attribute__((pure));
unsigned emu_block_dim(int axis) __attribute__((pure));
unsigned emu_grid_dim(int axis) __attribute__((pure));
unsigned emu_thread(void) __attribute__((pure));  // linear in the block; lane = thread % 32

// ---- shared memory
void *emu_dynamic_shared(void);
void *emu_static_shared(int id, size_t bytes, size_t align);  // one array a declaration: id is its number in the source
uint32_t emu_shared_address(const void *pointer);

// ---- launch; 0, or nonzero after a finding that ended it
int emu_launch(const char *name, const unsigned grid[3], const unsigned block[3], size_t shared_bytes,
               void (*kernel)(void *), void *arguments);
// A finding that ends the launch.
void emu_fail(const char *message) __attribute__((noreturn, cold));

// ---- barriers of the block: id 0 with threads 0 is __syncthreads
void emu_barrier_sync(int id, int threads);
void emu_barrier_arrive(int id, int threads);
int emu_barrier_count(int predicate);  // __syncthreads, and how many threads gave a nonzero predicate
void emu_threadfence(void);

// ---- warp collectives: the last lane to arrive runs `perform` once over the records of all lanes in the mask
typedef void (*EmuPerform)(void **records, unsigned mask);
void emu_warp_collective(const char *name, unsigned mask, void *record, EmuPerform perform, int orders_memory);

// ---- atomics: called before the plain read-modify-write, which no other thread can interrupt
void emu_atomic(void *address, int bytes);
void emu_atomic_load(void *address, int bytes);

// ---- cp.async
void emu_cp_async(void *shared, const void *global, int bytes, int source_bytes);  // the rest is filled with zeros
void emu_cp_async_commit(void);
void emu_cp_async_wait(int groups_left);  // 0 is wait_all: uncommitted copies too
void emu_cp_async_mbarrier_arrive(void *barrier, int noinc);

// ---- matrices in registers; types are EmuType, registers as the PTX ISA lays them out
void emu_ldmatrix(int matrices, int transposed, const void *shared, void *registers);
void emu_stmatrix(int matrices, int transposed, void *shared, const int32_t *registers);
void emu_mma(int a_type, int b_type, int c_type, int m, int n, int k, void *c, const void *a, const void *b);

// ---- mbarriers
void emu_mbarrier_init(void *barrier, uint32_t count);
void emu_mbarrier_arrive(void *barrier, uint32_t count);
void emu_mbarrier_expect_tx(void *barrier, uint32_t bytes);
void emu_mbarrier_wait(void *barrier, uint32_t parity);
int emu_mbarrier_test(void *barrier, uint32_t parity);
void emu_fence_mbarrier_init(void);
void emu_fence_proxy_async(void);

// ---- TMA; coordinates innermost first
int emu_tensor_map_encode(void *map, int type, unsigned rank, void *global, const uint64_t *dims,
                          const uint64_t *strides, const uint32_t *box, const uint32_t *element_strides, int interleave,
                          int swizzle, int l2_promotion, int oob_fill);
void emu_tma_prefetch(const void *map);
void emu_tma_load(const void *map, void *barrier, void *shared, int rank, const int32_t *coordinates);
void emu_bulk_load(void *shared, const void *global, void *barrier, uint32_t bytes);
void emu_tma_store(const void *map, const void *shared, int rank, const int32_t *coordinates, int add);
void emu_bulk_store(void *global, const void *shared, uint32_t bytes, int add_f32);
void emu_bulk_commit(void);
void emu_bulk_wait(int groups_left, int read);

// ---- wgmma: m is 64; a is null for operands in shared memory
void emu_wgmma(int a_type, int b_type, int c_type, int n, int k, int a_mn_major, int b_mn_major, int a_sign, int b_sign,
               uint64_t a_descriptor, const uint32_t *a, uint64_t b_descriptor, uint32_t *c, int accumulate);
void emu_wgmma_fence(void);
void emu_wgmma_commit(void);
void emu_wgmma_wait(int groups_left);
}
