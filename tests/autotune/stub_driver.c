/* A library with the entry points of libcuda.so.1 that the launcher uses. It writes down what it is asked.

   stub_*  is the test's side: how many devices there are, what fails, and the record, one line a call.
   Handles are small numbers: a context is 0x1000 + device, a module 0x2000 + n, a function 0x3000 + n.
   A driver does not know the sizes of a kernel's parameters from a launch alone; a test says them with stub_sizes. */
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

typedef int CUresult;
enum { NO_ERROR = 0, INVALID_VALUE = 1, NO_DEVICE = 100, INVALID_DEVICE = 101, INVALID_CONTEXT = 201, NOT_FOUND = 500 };
enum { MAX_DEVICES = 8, MAX_FUNCTIONS = 256, MAX_STACK = 16, MAX_PARAMETERS = 32 };

typedef struct {
  int id;
  char pad[4];
  char value[64];
} Attribute;

typedef struct {
  unsigned grid[3], block[3], shared;
  void *stream;
  Attribute *attributes;
  unsigned count;
} Config;

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static char record[1 << 20];
static size_t length;
static int quiet, devices = 1, capability = 90, version = 13000, capturing;
static char failing[64];
static CUresult failure;
static int sizes[MAX_PARAMETERS], parameters;
static uintptr_t modules, functions;
static long launches;
static __thread uintptr_t stack[MAX_STACK];
static __thread int depth;
static __thread int mode;

static void note(const char *format, ...) {
  if (quiet) return;
  pthread_mutex_lock(&mutex);
  va_list arguments;
  va_start(arguments, format);
  int n = vsnprintf(record + length, sizeof record - length, format, arguments);
  va_end(arguments);
  if (n > 0 && length + n < sizeof record) length += n;
  pthread_mutex_unlock(&mutex);
}

static CUresult fails(const char *call) { return strcmp(call, failing) ? NO_ERROR : failure; }
#define MAY_FAIL                  \
  do {                            \
    CUresult e_ = fails(__func__); \
    if (e_) return e_;            \
  } while (0)

/* ---- the test's side */

void stub_reset(void) {
  length = 0, record[0] = 0, quiet = 0, devices = 1, capability = 90, version = 13000, capturing = 0;
  failing[0] = 0, parameters = 0, modules = functions = 0, launches = 0, depth = 0;
}
const char *stub_record(void) { return record; }
void stub_forget(void) { length = 0, record[0] = 0; }
void stub_quiet(int on) { quiet = on; }
void stub_devices(int count) { devices = count; }
void stub_capability(int number) { capability = number; }
void stub_version(int number) { version = number; }
void stub_capturing(int on) { capturing = on; }
void stub_fail(const char *call, CUresult result) {
  snprintf(failing, sizeof failing, "%s", call);
  failure = result;
}
void stub_sizes(const int *bytes, int count) {
  memcpy(sizes, bytes, count * sizeof *bytes);
  parameters = count;
}
void stub_push(uintptr_t context) { stack[depth++] = context; }
uintptr_t stub_current(void) { return depth ? stack[depth - 1] : 0; }
int stub_depth(void) { return depth; }
int stub_mode(void) { return mode; }
long stub_launches(void) { return launches; }

/* ---- the driver's side */

CUresult cuInit(unsigned flags) {
  MAY_FAIL;
  return devices ? NO_ERROR : NO_DEVICE;
}

CUresult cuDriverGetVersion(int *number) {
  *number = version;
  return NO_ERROR;
}

CUresult cuGetErrorName(CUresult error, const char **text) {
  switch (error) {
    case INVALID_VALUE: return *text = "CUDA_ERROR_INVALID_VALUE", NO_ERROR;
    case NO_DEVICE: return *text = "CUDA_ERROR_NO_DEVICE", NO_ERROR;
    case INVALID_DEVICE: return *text = "CUDA_ERROR_INVALID_DEVICE", NO_ERROR;
    case NOT_FOUND: return *text = "CUDA_ERROR_NOT_FOUND", NO_ERROR;
    case 2: return *text = "CUDA_ERROR_OUT_OF_MEMORY", NO_ERROR;
    case 209: return *text = "CUDA_ERROR_NO_BINARY_FOR_GPU", NO_ERROR;
    case 700: return *text = "CUDA_ERROR_ILLEGAL_ADDRESS", NO_ERROR;
  }
  return *text = NULL, INVALID_VALUE;
}

CUresult cuGetErrorString(CUresult error, const char **text) {
  const char *name;
  if (cuGetErrorName(error, &name)) return *text = NULL, INVALID_VALUE;
  return *text = "in the stub's words", NO_ERROR;
}

CUresult cuDeviceGet(int *device, int ordinal) {
  if (ordinal >= devices) return INVALID_DEVICE;
  *device = ordinal;
  return NO_ERROR;
}

CUresult cuDeviceGetAttribute(int *value, int attribute, int device) {
  if (attribute != 75 && attribute != 76) return INVALID_VALUE;
  *value = attribute == 75 ? capability / 10 : capability % 10;
  return NO_ERROR;
}

CUresult cuDevicePrimaryCtxRetain(uintptr_t *context, int device) {
  MAY_FAIL;
  *context = 0x1000 + device;
  note("retain %d\n", device);
  return NO_ERROR;
}

CUresult cuDevicePrimaryCtxRelease_v2(int device) {
  note("release %d\n", device);
  return NO_ERROR;
}

CUresult cuCtxGetCurrent(uintptr_t *context) {
  MAY_FAIL;
  *context = stub_current();
  return NO_ERROR;
}

CUresult cuCtxPushCurrent_v2(uintptr_t context) {
  MAY_FAIL;
  if (depth == MAX_STACK) return INVALID_CONTEXT;
  stack[depth++] = context;
  note("push %lx\n", (long)context);
  return NO_ERROR;
}

CUresult cuCtxPopCurrent_v2(uintptr_t *context) {
  MAY_FAIL;
  if (!depth) return INVALID_CONTEXT;
  *context = stack[--depth];
  note("pop %lx\n", (long)*context);
  return NO_ERROR;
}

CUresult cuThreadExchangeStreamCaptureMode(int *exchanged) {
  int before = mode;
  mode = *exchanged;
  *exchanged = before;
  return NO_ERROR;
}

CUresult cuStreamIsCapturing(void *stream, int *status) {
  *status = capturing;
  return NO_ERROR;
}

CUresult cuModuleLoadData(uintptr_t *module, const void *image) {
  MAY_FAIL;
  if (!depth) return INVALID_CONTEXT;
  *module = 0x2000 + __atomic_fetch_add(&modules, 1, __ATOMIC_SEQ_CST);
  note("load %lx in %lx mode %d magic %08x\n", (long)*module, (long)stub_current(), mode, *(const uint32_t *)image);
  return NO_ERROR;
}

CUresult cuModuleUnload(uintptr_t module) {
  note("unload %lx\n", (long)module);
  return NO_ERROR;
}

CUresult cuModuleGetFunction(uintptr_t *function, uintptr_t module, const char *name) {
  MAY_FAIL;
  *function = 0x3000 + __atomic_fetch_add(&functions, 1, __ATOMIC_SEQ_CST);
  note("function %lx of %lx is %s\n", (long)*function, (long)module, name);
  return NO_ERROR;
}

CUresult cuFuncSetAttribute(uintptr_t function, int attribute, int value) {
  MAY_FAIL;
  note("attribute %d of %lx is %d\n", attribute, (long)function, value);
  return NO_ERROR;
}

CUresult cuTensorMapEncodeTiled(uint64_t *map, int type, unsigned rank, void *address, const uint64_t *dims,
                                const uint64_t *strides, const unsigned *box, const unsigned *steps, int interleave,
                                int swizzle, int l2, int fill) {
  MAY_FAIL;
  if ((uintptr_t)map & 127) return INVALID_VALUE; /* as it is declared; the driver demands 64 */
  for (unsigned i = 0; i < rank; ++i)
    if (!dims[i] || dims[i] > (1ull << 32) || !box[i] || box[i] > 256 || (i + 1 < rank && strides[i] & 15))
      return INVALID_VALUE;
  memset(map, 0, 128);
  map[0] = (uintptr_t)address; /* so that a launch shows which map it was given */
  map[15] = 0x7e57;
  if (quiet) return NO_ERROR;
  char text[400];
  int n = snprintf(text, sizeof text, "tensor_map %p type %d dims", address, type);
  for (unsigned i = 0; i < rank; ++i) n += snprintf(text + n, sizeof text - n, " %lu", (long)dims[i]);
  n += snprintf(text + n, sizeof text - n, " strides");
  for (unsigned i = 0; i + 1 < rank; ++i) n += snprintf(text + n, sizeof text - n, " %lu", (long)strides[i]);
  n += snprintf(text + n, sizeof text - n, " box");
  for (unsigned i = 0; i < rank; ++i) n += snprintf(text + n, sizeof text - n, " %u", box[i]);
  note("%s swizzle %d\n", text, swizzle);
  return NO_ERROR;
}

CUresult cuLaunchKernelEx(const Config *c, uintptr_t function, void **given, void **extra) {
  MAY_FAIL;
  __atomic_fetch_add(&launches, 1, __ATOMIC_SEQ_CST);
  if (quiet) return NO_ERROR;
  char text[4096];
  int n = snprintf(text, sizeof text, "launch %lx in %lx grid %u %u %u block %u %u %u shared %u stream %lx attributes",
                   (long)function, (long)stub_current(), c->grid[0], c->grid[1], c->grid[2], c->block[0], c->block[1],
                   c->block[2], c->shared, (long)c->stream);
  for (unsigned i = 0; i < c->count; ++i)
    n += snprintf(text + n, sizeof text - n, " %d=%d", c->attributes[i].id, *(int *)c->attributes[i].value);
  n += snprintf(text + n, sizeof text - n, " parameters");
  for (int i = 0; i < parameters; ++i) {
    n += snprintf(text + n, sizeof text - n, " ");
    for (int j = 0; j < sizes[i]; ++j)
      n += snprintf(text + n, sizeof text - n, "%02x", ((const unsigned char *)given[i])[j]);
  }
  note("%s\n", text);
  return NO_ERROR;
}
