// Walks sequences, heads and chunks on the CPU and calls a compiled tile kernel once a chunk and head.
//
// A built object is: tile.h, the C++ that TileLang emitted, this file, and a generated `Spec` that says what the
// kernel's parameters are. It needs only libc and libstdc++'s headers: no torch, no Python, no tile compiler.
//
// The one entry takes a block of 8-byte words, packed by autotune/launcher/cpu.py. What changes from call to call comes
// first, so that the rest can be kept:
//   cu_seqlens or 0, slots or 0 (int64)
//   for every tensor argument   token, pool,    its address
//                               chunk
//                               state, vector   address of the initial value or 0, and of the final value or 0
//                                               (both contiguous, fp32)
//   Header                      sizes and how to walk them
//   the kernel's scalars        integers, or doubles
//   for every tensor argument   token           sequence, token and head stride
//                               pool            slot and head stride
//
// Each (sequence, segment, head) is computed by one thread, whichever it is: results depend on the number of
// segments, which the caller chooses, and not on the number of threads.
#pragma once
#include <dlfcn.h>
#include <xmmintrin.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#if defined(__x86_64__)  // the oldest version of what newer C libraries have moved, so that older ones will do
__asm__(".symver dlsym, dlsym@GLIBC_2.2.5");
#endif

namespace linattn {

enum Role { TOKEN, STATE, VECTOR, POOL, CHUNK };

struct ArgSpec {
  Role role;
  bool value_heads;  // walked by value head (HV), not by q/k head (H)
  bool transposed;   // the working copy of a state is [V, K]
  int size;          // bytes an element
  int64_t every;     // of a CHUNK: tokens from one to the next
};

enum Header { N, T, H, HEADS, K, V, SEGMENTS, SEGMENT_STATES, THREADS, HEADER };

// What one kernel call gets; the generated Spec::run hands it on in the emitted function's order.
template <int ARGS>
struct Step {
  char* data[ARGS];
  int64_t row[ARGS];   // token stride; of a CHUNK, from one to the next that is walked
  int64_t head[ARGS];  // head stride
  int32_t rows, K, V, heads, live, keeps;
  const int64_t* scalars;
};

// Segments begin at multiples of this, so that kernels with different chunks cut a sequence at the same tokens.
constexpr int64_t SEGMENT_ALIGN = 256;

inline double as_double(int64_t word) {
  double x;
  memcpy(&x, &word, sizeof x);
  return x;
}

// The bits of MXCSR by which numbers below 1e-38 are zero: a state that decays through them would take fifty times as
// long. Set while a thread computes; its own mode is back afterwards.
constexpr unsigned FLUSH_TO_ZERO = 0x8040;

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// A [rows, columns] matrix with any strides <-> panels [columns / block, padded rows, block], padded with zeros.
struct Panels {
  int64_t rows, columns, padded_rows, block;

  int64_t size() const { return ceil_div(columns, block) * block * padded_rows; }

  float* at(float* panels, int64_t i, int64_t j) const {
    return panels + ((j / block) * padded_rows + i) * block + j % block;
  }

  void load(float* panels, const float* src, int64_t row, int64_t column) const {
    memset(panels, 0, sizeof(float) * size());
    if (!src) return;
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t j = 0; j < columns; ++j) *at(panels, i, j) = src[i * row + j * column];
  }

  void store(float* panels, float* dst, int64_t row, int64_t column) const {
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t j = 0; j < columns; ++j) dst[i * row + j * column] = *at(panels, i, j);
  }
};

template <class Spec>
struct Launch {
  static constexpr int ARGS = Spec::ARGS;
  static_assert(SEGMENT_ALIGN % Spec::CHUNK == 0, "a chunk must not cross a segment's end");

  const int64_t *cu, *slots;
  const int64_t* call;             // the Header
  const int64_t* address[ARGS];    // each argument's addresses
  const int64_t* stride[ARGS];     // and strides
  int64_t group;               // q/k heads that one item walks together, chunk by chunk
  int64_t groups, items;
  int64_t scratch_floats;  // one head's working states
  int64_t offset[ARGS];    // of a state inside them
  std::atomic<int64_t> next{0};
  std::atomic<int> failed{0};

  explicit Launch(const int64_t* block) : cu((const int64_t*)block[0]), slots((const int64_t*)block[1]) {
    const int64_t* word = block + 2;
    for (int a = 0; a < ARGS; ++a) {
      address[a] = word;
      word += Spec::args[a].role == STATE || Spec::args[a].role == VECTOR ? 2 : 1;
    }
    call = word;
    word += HEADER + Spec::SCALARS;
    scratch_floats = 0;
    for (int a = 0; a < ARGS; ++a) {
      const Role role = Spec::args[a].role;
      stride[a] = word;
      word += role == TOKEN ? 3 : role == POOL ? 2 : 0;
      offset[a] = scratch_floats;
      if (role == STATE) scratch_floats += call[HEADS] * panels(a).size();
      if (role == VECTOR) scratch_floats += ceil_div(call[K], Spec::BLOCK) * Spec::BLOCK;
    }
    // Heads lie next to each other in [B, T, H, D], so walking a few together reads whole pages of memory.
    // Not so many that a thread is left without work.
    const int64_t per_thread = call[N] * call[SEGMENTS] * call[H] / (2 * call[THREADS]);
    group = per_thread < 1 ? 1 : per_thread > 4 ? 4 : per_thread;
    groups = ceil_div(call[H], group);
    items = call[N] * call[SEGMENTS] * groups;
  }

  Panels panels(int a) const {
    const bool t = Spec::args[a].transposed;
    const int64_t rows = t ? call[V] : call[K];
    return {rows, t ? call[K] : call[V], ceil_div(rows, 16) * 16, Spec::BLOCK};
  }

  int64_t state_index(int64_t n, int64_t segment) const {
    return call[SEGMENT_STATES] ? n * call[SEGMENTS] + segment : n;
  }

  // Elements of a state that one kernel leaves for another.
  int64_t chunk_state() const { return ceil_div(call[K], 16) * 16 * ceil_div(call[V], 16) * 16; }

  // Of the states kept every so many tokens the one at a token, or -1 where none is. Those of all sequences are
  // numbered; packed ones leave at most one number a sequence out.
  int64_t chunk_slot(int64_t n, int64_t token, int64_t every) const {
    const int64_t begin = cu ? cu[n] : 0, before = cu ? begin / every + n : n * ceil_div(call[T], every);
    return (token - begin) % every ? -1 : before + (token - begin) / every;
  }

  // Working states of one head: copied in before its first chunk, and out after its last.
  void load_states(float* scratch, int64_t index, int64_t h) const {
    for (int a = 0; a < ARGS; ++a) {
      const float* initial = (const float*)address[a][0];
      if (Spec::args[a].role == VECTOR) {
        float* z = scratch + offset[a];
        memset(z, 0, sizeof(float) * ceil_div(call[K], Spec::BLOCK) * Spec::BLOCK);
        if (initial) memcpy(z, initial + (index * call[H] + h) * call[K], sizeof(float) * call[K]);
      }
      if (Spec::args[a].role != STATE) continue;
      const Panels p = panels(a);
      for (int64_t r = 0; r < call[HEADS]; ++r) {
        const float* src = initial ? initial + ((index * call[H] + h) * call[HEADS] + r) * call[K] * call[V] : nullptr;
        const bool t = Spec::args[a].transposed;
        p.load(scratch + offset[a] + r * p.size(), src, t ? 1 : call[V], t ? call[V] : 1);
      }
    }
  }

  void store_states(float* scratch, int64_t index, int64_t h) const {
    for (int a = 0; a < ARGS; ++a) {
      const Role role = Spec::args[a].role;
      if (role != STATE && role != VECTOR) continue;
      float* final = (float*)address[a][1];
      if (!final) continue;
      if (role == VECTOR) {
        memcpy(final + (index * call[H] + h) * call[K], scratch + offset[a], sizeof(float) * call[K]);
        continue;
      }
      const Panels p = panels(a);
      for (int64_t r = 0; r < call[HEADS]; ++r) {
        float* dst = final + ((index * call[H] + h) * call[HEADS] + r) * call[K] * call[V];
        const bool t = Spec::args[a].transposed;
        p.store(scratch + offset[a] + r * p.size(), dst, t ? 1 : call[V], t ? call[V] : 1);
      }
    }
  }

  void run_chunk(float* scratch, int64_t n, int64_t h, int64_t token, int64_t rows) const {
    const int64_t slot = slots ? slots[n] : n;
    Step<ARGS> step;
    step.keeps = 0;
    for (int a = 0; a < ARGS; ++a) {
      char* data = (char*)address[a][0];
      const int64_t* s = stride[a];
      const int64_t head = Spec::args[a].value_heads ? h * call[HEADS] : h;
      switch (Spec::args[a].role) {
        case TOKEN:
          step.data[a] = data + Spec::args[a].size * ((cu ? 0 : n * s[0]) + token * s[1] + head * s[2]);
          step.row[a] = s[1];
          step.head[a] = s[2];
          break;
        case POOL:
          step.data[a] = data + Spec::args[a].size * ((slot < 0 ? 0 : slot) * s[0] + head * s[1]);
          step.head[a] = s[1];
          break;
        case CHUNK: {
          step.row[a] = chunk_state() * call[H] * call[HEADS] * (Spec::REVERSE ? -1 : 1);
          const int64_t kept = chunk_slot(n, token, Spec::args[a].every);
          step.keeps = data && kept >= 0;
          step.data[a] = step.keeps ? data + sizeof(float) * chunk_state() * (kept * call[H] * call[HEADS] + head) : nullptr;
          break;
        }
        default:
          step.data[a] = (char*)(scratch + offset[a]);
      }
    }
    step.rows = (int32_t)rows;
    step.K = (int32_t)call[K];
    step.V = (int32_t)call[V];
    step.heads = (int32_t)call[HEADS];
    step.live = slot >= 0;
    step.scalars = call + HEADER;
    Spec::run(step);
  }

  void run_item(float* scratch, int64_t item) const {
    const int64_t h0 = item % groups * group;
    const int64_t h1 = h0 + group < call[H] ? h0 + group : call[H];
    const int64_t segment = item / groups % call[SEGMENTS];
    const int64_t n = item / groups / call[SEGMENTS];
    const int64_t begin = cu ? cu[n] : 0, end = cu ? cu[n + 1] : call[T];
    const int64_t share = ceil_div(ceil_div(end - begin, SEGMENT_ALIGN), call[SEGMENTS]) * SEGMENT_ALIGN;
    const int64_t from = segment * share < end - begin ? begin + segment * share : end;
    const int64_t to = share < end - from ? from + share : end;
    const int64_t chunks = ceil_div(to - from, Spec::CHUNK);
    const int64_t index = state_index(n, segment);
    for (int64_t h = h0; h < h1; ++h) load_states(scratch + (h - h0) * scratch_floats, index, h);
    for (int64_t i = 0; i < chunks; ++i) {
      const int64_t token = from + (Spec::REVERSE ? chunks - 1 - i : i) * Spec::CHUNK;
      const int64_t rows = to - token < Spec::CHUNK ? to - token : Spec::CHUNK;
      for (int64_t h = h0; h < h1; ++h) run_chunk(scratch + (h - h0) * scratch_floats, n, h, token, rows);
    }
    for (int64_t h = h0; h < h1; ++h) store_states(scratch + (h - h0) * scratch_floats, index, h);
  }

  static void work(void* self) { ((Launch*)self)->work(); }

  void work() {
    float* scratch = nullptr;
    const size_t bytes = sizeof(float) * group * scratch_floats;
    if (bytes && posix_memalign((void**)&scratch, 64, bytes)) {
      failed = 1;
      return;
    }
    const unsigned mode = _mm_getcsr();
    _mm_setcsr(mode | FLUSH_TO_ZERO);
    for (int64_t item; (item = next++) < items;) run_item(scratch, item);
    _mm_setcsr(mode);
    free(scratch);
  }

  // 0, or 1 when there was no memory for the working states.
  int64_t run() {
    typedef void (*Parallel)(void (*)(void*), void*, unsigned, unsigned);
    // torch's own OpenMP runtime, so that its threads are used and not doubled; a process without one runs serially
    const int64_t threads = call[THREADS] < items ? call[THREADS] : items;
    const Parallel parallel = threads > 1 ? (Parallel)dlsym(RTLD_DEFAULT, "GOMP_parallel") : nullptr;
    if (parallel)
      parallel(work, this, (unsigned)threads, 0);
    else
      work();
    return failed;
  }
};

}  // namespace linattn
