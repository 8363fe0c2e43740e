// Makes a call again from Python, with other tensors of the same layouts, without asking Python about them.
//
// A first call checks its arguments in Python and packs a block of words for the entry of a compiled kernel. The block
// is kept in a table of its op's calls, with the dtype, device, sizes and strides of the tensors. The table has a
// builtin function, which takes what the public function takes and reads each tensor through DLPack's exchange table.
// Where a kept call had such tensors and the same plain arguments, every check in Python would say what it said then,
// and its block is launched with the new addresses; otherwise the function returns None and has done nothing.
//
// Every object has this code, and any of them can make a table, which then launches the kernels of all. Python's
// functions are from its stable ABI. They are looked for when the first table is made, so that an object needs no
// Python and no torch to load.
//
// Threads: calls are only ever added, so that one that reads a table needs no lock; Python adds one at a time.
//
// Source: DLPack 1.3, dlpack.h, struct DLPackExchangeAPI (the layouts are repeated below, since no header is needed to
// build a kernel); PEP 384 and the C API's "Stable ABI Contents".
#pragma once
#include <dlfcn.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace linattn {
namespace repeat {

typedef struct Object_ Object;  // PyObject
typedef intptr_t Size;          // Py_ssize_t

struct DLTensor {
  char* data;
  int32_t device_type, device;
  int32_t rank;
  uint8_t code, bits;
  uint16_t lanes;
  int64_t *sizes, *strides;
  uint64_t offset;  // bytes
};

struct Exchange {  // DLPackExchangeAPI
  uint32_t major, minor;
  void* older;
  void *allocate, *from_object, *to_object;
  int (*read)(Object*, DLTensor*);  // -1 with an exception set
  int (*stream)(int32_t device_type, int32_t device, void** stream);
};

struct MethodDef {
  const char* name;
  void* function;
  int flags;
  const char* doc;
};
constexpr int METH_FASTCALL = 0x80;
constexpr unsigned long TUPLE_SUBCLASS = 1ul << 26;  // Py_TPFLAGS_TUPLE_SUBCLASS

#define LINATTN_PYTHON(X)                                            \
  X(Object*, PyObject_Type, (Object*))                               \
  X(unsigned long, PyType_GetFlags, (Object*))                       \
  X(int, PyObject_RichCompareBool, (Object*, Object*, int))          \
  X(int, PyDict_SetItem, (Object*, Object*, Object*))                \
  X(Object*, PyObject_GetAttr, (Object*, Object*))                   \
  X(Object*, PyObject_GetAttrString, (Object*, const char*))         \
  X(Object*, PyObject_CallFunctionObjArgs, (Object*, ...))           \
  X(Size, PyTuple_Size, (Object*))                                   \
  X(Object*, PyTuple_GetItem, (Object*, Size))                       \
  X(Object*, PyTuple_New, (Size))                                    \
  X(int, PyTuple_SetItem, (Object*, Size, Object*))                  \
  X(Object*, PyList_New, (Size))                                     \
  X(int, PyList_SetItem, (Object*, Size, Object*))                   \
  X(long long, PyLong_AsLongLong, (Object*))                         \
  X(Object*, PyLong_FromLongLong, (long long))                       \
  X(void*, PyCapsule_GetPointer, (Object*, const char*))             \
  X(Object*, PyCapsule_New, (void*, const char*, void (*)(Object*))) \
  X(Object*, PyCFunction_NewEx, (MethodDef*, Object*, Object*))      \
  X(void, PyErr_Clear, ())                                           \
  X(Object*, PyErr_Occurred, ())                                     \
  X(void, PyErr_SetString, (Object*, const char*))                   \
  X(void*, PyEval_SaveThread, ())                                    \
  X(void, PyEval_RestoreThread, (void*))                             \
  X(void, Py_IncRef, (Object*))                                      \
  X(void, Py_DecRef, (Object*))

struct Python {
#define LINATTN_DECLARE(result, name, parameters) result(*name) parameters;
  LINATTN_PYTHON(LINATTN_DECLARE)
#undef LINATTN_DECLARE
  Object *none, *yes, **value_error;
  Object* (*PyObject_Vectorcall)(Object*, Object* const*, size_t, Object*);  // a function since Python 3.11, or nullptr
};

static Python python;

// function() or function(argument): a new reference, or nullptr with an exception set.
static Object* ask(Object* function, Object* argument = nullptr) {
  if (python.PyObject_Vectorcall) return python.PyObject_Vectorcall(function, &argument, argument ? 1 : 0, nullptr);
  return python.PyObject_CallFunctionObjArgs(function, argument, nullptr);
}

static bool find_python() {
#define LINATTN_FIND_PYTHON(result, name, parameters) \
  if (!(*(void**)&python.name = dlsym(RTLD_DEFAULT, #name))) return false;
  LINATTN_PYTHON(LINATTN_FIND_PYTHON)
#undef LINATTN_FIND_PYTHON
  *(void**)&python.PyObject_Vectorcall = dlsym(RTLD_DEFAULT, "PyObject_Vectorcall");
  python.none = (Object*)dlsym(RTLD_DEFAULT, "_Py_NoneStruct");
  python.yes = (Object*)dlsym(RTLD_DEFAULT, "_Py_TrueStruct");
  python.value_error = (Object**)dlsym(RTLD_DEFAULT, "PyExc_ValueError");
  return python.none && python.yes && python.value_error;
}

// ---- what is kept of a call

constexpr int MAX_RANK = 6, MAX_TENSORS = 16, MAX_PLAIN = 8, MAX_CONDITIONS = 8, MAX_WORDS = 96;
constexpr int BUCKETS = 64, MAX_CALLS = 1024;
constexpr int INTEGER = 0;  // DLPack's code of a dtype
constexpr int EQUAL = 2;    // Py_EQ

enum Flag {
  APART = 1,     // it is written: shares memory with no other
  CHANGED = 2,   // it is the caller's, and its version goes up
  RETURNED = 4,  // it is a result
};

struct Layout {
  int32_t device_type, device, rank, element;
  int64_t sizes[MAX_RANK], strides[MAX_RANK];
  int64_t bytes;  // from its first to its last

  static int32_t element_of(const DLTensor& x) { return x.code << 24 | x.bits << 16 | x.lanes; }

  // Returns false for a tensor with more axes than fit, or without elements: nothing is launched for that.
  bool take(const DLTensor& x) {
    if (x.rank > MAX_RANK) return false;
    device_type = x.device_type, device = x.device, rank = x.rank, element = element_of(x);
    int64_t last = 0;
    for (int i = 0; i < rank; ++i) {
      sizes[i] = x.sizes[i], strides[i] = x.strides[i];
      if (!sizes[i]) return false;
      last += (sizes[i] - 1) * strides[i];
    }
    bytes = (last + 1) * (x.bits / 8);
    return true;
  }

  bool fits(const DLTensor& x) const {
    return x.rank == rank && !memcmp(x.sizes, sizes, rank * sizeof *sizes) &&
           !memcmp(x.strides, strides, rank * sizeof *strides) && element_of(x) == element &&
           x.device_type == device_type && x.device == device;
  }
};

static int bucket_of(const DLTensor& x) {
  uint64_t hash = (uint64_t)x.rank;
  for (int i = 0; i < x.rank; ++i) hash = (hash ^ (uint64_t)x.sizes[i]) * 0x9e3779b97f4a7c15u;
  return (int)(hash >> 58);
}
static_assert(BUCKETS == 1 << (64 - 58), "");

struct Tensor {
  bool missing;  // it was None
  int word;      // where its address goes in the block, or -1
  int flags;
  Object* make;  // makes it where it is None, or nullptr
  Layout layout;
};

struct Condition {  // function(argument) must give this very object
  Object *function, *argument, *result;
};

struct Conditions {
  int count;
  Condition all[MAX_CONDITIONS];
};

struct Call {
  const Call* next;  // of its bucket
  int64_t (*entry)(const int64_t*);
  int tensors, words, place, results, changed;
  int64_t alignment;  // bytes, of every address
  Object *fail, *backend;
  Object* plain[MAX_PLAIN];
  Conditions conditions;
  int64_t block[MAX_WORDS];
  Tensor tensor[MAX_TENSORS];
};

struct Table {
  const Exchange* exchange;
  Object *tensor, *is_neg, *grad_enabled, *requires_grad, *increment_version;
  Object *served, *op;  // served[op] is the backend of the last call
  int given, inside[MAX_TENSORS];  // of what Python hands over: how many, and how many tensors each has if it is a tuple
  int tensors, plain, calls;
  Conditions conditions;
  std::atomic<const Call*> bucket[BUCKETS];
};

static Object* keep(Object* x) {
  python.Py_IncRef(x);
  return x;
}

static void drop(Object* x) {
  if (x) python.Py_DecRef(x);
}

static void drop(const Conditions& conditions) {
  for (int i = 0; i < conditions.count; ++i) {
    const Condition& c = conditions.all[i];
    drop(c.function), drop(c.argument), drop(c.result);
  }
}

static void drop(const Table* table, const Call* call) {
  drop(call->fail), drop(call->backend), drop(call->conditions);
  for (int i = 0; i < table->plain; ++i) drop(call->plain[i]);
  for (int i = 0; i < call->tensors; ++i) drop(call->tensor[i].make);
  free((void*)call);
}

static Table* table_of(Object* capsule) { return (Table*)python.PyCapsule_GetPointer(capsule, nullptr); }

static void drop_table(Object* capsule) {
  Table* table = table_of(capsule);
  if (!table) return python.PyErr_Clear();
  for (auto& bucket : table->bucket)
    for (const Call *call = bucket.load(), *next; call; call = next) {
      next = call->next;
      drop(table, call);
    }
  drop(table->tensor), drop(table->is_neg), drop(table->grad_enabled), drop(table->requires_grad);
  drop(table->increment_version), drop(table->served), drop(table->op), drop(table->conditions);
  free(table);
}

// ---- making a call again

struct Again {
  const Table* table;
  const Call* call = nullptr;
  Object* const* plain;
  Object* given[MAX_TENSORS];  // borrowed, or ours where made is set
  bool made[MAX_TENSORS] = {};
  DLTensor tensor[MAX_TENSORS];
  int count = 0;
  bool gradients;  // are recorded

  Again(const Table* table, Object* const* plain) : table(table), plain(plain) {}

  // Not a destructor: that would be a reason to unwind, which needs the C++ library.
  void drop_made() const {
    for (int i = 0; i < count; ++i)
      if (made[i]) python.Py_DecRef(given[i]);
  }

  // ---- what is given

  static Object* type_of(Object* x) {
    Object* type = python.PyObject_Type(x);
    python.Py_DecRef(type);  // the object keeps it
    return type;
  }

  // The tensors one by one: tuples among the arguments, such as a state, are opened.
  bool open(Object* const* from) {
    for (int i = 0; i < table->given; ++i) {
      const int inside = table->inside[i];
      if (!inside || from[i] == python.none) {
        for (int j = 0; j < (inside ? inside : 1); ++j) given[count++] = from[i];
        continue;
      }
      if (!(python.PyType_GetFlags(type_of(from[i])) & TUPLE_SUBCLASS)) return false;
      if (python.PyTuple_Size(from[i]) != inside) return false;
      for (int j = 0; j < inside; ++j) given[count++] = python.PyTuple_GetItem(from[i], j);
    }
    return given[0] != python.none;
  }

  bool read(int i) {
    if (type_of(given[i]) != table->tensor) return false;
    return !table->exchange->read(given[i], &tensor[i]) || (python.PyErr_Clear(), false);
  }

  bool read_all() {
    for (int i = 0; i < count; ++i)
      if (given[i] != python.none && !read(i)) return false;
    return true;
  }

  int64_t address(int i) const { return (int64_t)tensor[i].data + (int64_t)tensor[i].offset; }

  // ---- a kept call like it

  static bool hold(const Conditions& conditions) {
    for (int i = 0; i < conditions.count; ++i) {
      const Condition& c = conditions.all[i];
      Object* found = ask(c.function, c.argument);
      if (!found) return python.PyErr_Clear(), false;
      python.Py_DecRef(found);
      if (found != c.result) return false;
    }
    return true;
  }

  static bool same(Object* x, Object* kept) {
    return x == kept || (type_of(x) == type_of(kept) && python.PyObject_RichCompareBool(x, kept, EQUAL) == 1);
  }

  bool fits(const Call* like, int i) const {
    const Tensor& x = like->tensor[i];
    if (given[i] == python.none) return x.missing || x.make;
    return !x.missing && x.layout.fits(tensor[i]) && !(address(i) & (like->alignment - 1));
  }

  bool fits(const Call* like) const {
    for (int i = 0; i < count; ++i)
      if (!fits(like, i)) return false;
    for (int i = 0; i < table->plain; ++i)
      if (!same(plain[i], like->plain[i])) return false;
    return hold(like->conditions);
  }

  bool find() {
    call = table->bucket[bucket_of(tensor[0])].load(std::memory_order_acquire);
    while (call && !fits(call)) call = call->next;
    return call;
  }

  // ---- what a layout does not say

  static bool yes(Object* found) {
    if (!found) return python.PyErr_Clear(), true;  // it cannot be asked: not a tensor for us
    python.Py_DecRef(found);
    return found == python.yes;
  }

  // Plain numbers, which nobody differentiates.
  bool is_plain(int i) const {
    if (given[i] == python.none) return true;
    // A lazily negated view holds other numbers than it shows.
    if (call->tensor[i].layout.element >> 24 != INTEGER &&
        yes(ask(table->is_neg, given[i])))
      return false;
    return !gradients || !yes(python.PyObject_GetAttr(given[i], table->requires_grad));
  }

  bool is_apart(int i) const {
    const int64_t begin = address(i), end = begin + call->tensor[i].layout.bytes;
    for (int j = 0; j < call->tensors; ++j) {
      if (j == i || call->tensor[j].missing) continue;
      if (address(j) < end && begin < address(j) + call->tensor[j].layout.bytes) return false;
    }
    return true;
  }

  // ---- doing it

  // 1: done; 0: not such a call, and nothing was done; -1: an exception is set.
  int run(Object* const* from) {
    if (!open(from) || !hold(table->conditions) || !read_all() || !find()) return 0;
    gradients = yes(ask(table->grad_enabled));
    for (int i = 0; i < count; ++i)
      if (!is_plain(i)) return 0;
    while (count < call->tensors) given[count++] = python.none;
    for (int i = 0; i < count; ++i) {
      if (given[i] != python.none || call->tensor[i].missing) continue;
      given[i] = ask(call->tensor[i].make);
      if (!given[i]) return given[i] = python.none, -1;
      made[i] = true;
      if (!read(i) || !fits(call, i)) return 0;
    }
    for (int i = 0; i < count; ++i)
      if (call->tensor[i].flags & APART && !made[i] && !is_apart(i)) return 0;
    return launch();
  }

  int launch() {
    int64_t block[MAX_WORDS];
    memcpy(block, call->block, call->words * sizeof *block);
    for (int i = 0; i < count; ++i)
      if (!call->tensor[i].missing && call->tensor[i].word >= 0) block[call->tensor[i].word] = address(i);
    if (call->place >= 0) {
      void* stream = nullptr;
      if (table->exchange->stream(tensor[0].device_type, tensor[0].device, &stream)) return python.PyErr_Clear(), 0;
      block[call->place] = tensor[0].device;
      block[call->place + 1] = (int64_t)stream;
    }
    void* thread = python.PyEval_SaveThread();
    const int64_t status = call->entry(block);
    python.PyEval_RestoreThread(thread);
    if (status) return failed(status);
    if (python.PyDict_SetItem(table->served, table->op, call->backend)) return -1;
    return call->changed ? count_change() : 1;
  }

  int failed(int64_t status) const {
    Object* number = python.PyLong_FromLongLong(status);
    Object* raised = number ? ask(call->fail, number) : nullptr;
    drop(number);
    if (raised) {
      python.Py_DecRef(raised);
      python.PyErr_SetString(*python.value_error, "a launch failed, and nothing was raised");
    }
    return -1;
  }

  int count_change() const {
    Object* list = python.PyList_New(call->changed);
    if (!list) return -1;
    for (int i = 0, at = 0; i < count; ++i)
      if (call->tensor[i].flags & CHANGED) python.PyList_SetItem(list, at++, keep(given[i]));
    Object* done = ask(table->increment_version, list);
    python.Py_DecRef(list);
    if (!done) return -1;
    python.Py_DecRef(done);
    return 1;
  }

  // A tuple of what is returned, or the one thing that is.
  Object* results() const {
    Object* all = call->results == 1 ? nullptr : python.PyTuple_New(call->results);
    if (call->results > 1 && !all) return nullptr;
    for (int i = 0, at = 0; i < count; ++i) {
      if (!(call->tensor[i].flags & RETURNED)) continue;
      if (!all) return keep(given[i]);
      python.PyTuple_SetItem(all, at++, keep(given[i]));
    }
    return all;
  }
};

static Object* call_again(Object* capsule, Object* const* arguments, Size n) {
  const Table* table = table_of(capsule);
  if (!table) return nullptr;
  if (n != table->given + table->plain) return keep(python.none);
  Again again(table, arguments + table->given);
  const int done = again.run(arguments);
  Object* found = done < 0 ? nullptr : done ? again.results() : keep(python.none);
  again.drop_made();
  return found;
}

static MethodDef method = {"again", (void*)call_again, METH_FASTCALL,
                           "Make a call again that was made before with such arguments; None, with nothing done, for "
                           "any other."};

// ---- keeping one

struct Words {  // integers in a tuple
  Object* tuple;
  int64_t operator[](Size i) const { return python.PyLong_AsLongLong(python.PyTuple_GetItem(tuple, i)); }
};

static bool take_conditions(Conditions& conditions, Object* tuple) {
  const Size n = python.PyTuple_Size(tuple);
  if (n > MAX_CONDITIONS) return false;
  for (; conditions.count < n; ++conditions.count) {
    Object* c = python.PyTuple_GetItem(tuple, conditions.count);
    Object* argument = python.PyTuple_GetItem(c, 1);
    conditions.all[conditions.count] = {keep(python.PyTuple_GetItem(c, 0)),
                                        argument == python.none ? nullptr : keep(argument),
                                        keep(python.PyTuple_GetItem(c, 2))};
  }
  return true;
}

// (tensor or None, word, flags, make or None)
static bool take_tensor(const Table* table, Call* call, Object* tuple) {
  Tensor& a = call->tensor[call->tensors++];
  Object *x = python.PyTuple_GetItem(tuple, 0), *make = python.PyTuple_GetItem(tuple, 3);
  const Words words = {tuple};
  a.missing = x == python.none;
  a.word = (int)words[1];
  a.flags = (int)words[2];
  a.make = make == python.none ? nullptr : keep(make);
  call->results += a.flags & RETURNED ? 1 : 0;
  call->changed += a.flags & CHANGED ? 1 : 0;
  if (a.missing) return a.word < call->words;
  DLTensor read;
  return a.word < call->words && !table->exchange->read(x, &read) && a.layout.take(read);
}

static bool take_call(const Table* table, Call* call, Object* fields) {
  Object *tensors = python.PyTuple_GetItem(fields, 0), *plain = python.PyTuple_GetItem(fields, 1);
  const Size n = python.PyTuple_Size(tensors);
  call->fail = keep(python.PyTuple_GetItem(fields, 3));
  call->backend = keep(python.PyTuple_GetItem(fields, 4));
  if (n > MAX_TENSORS || n < table->tensors || python.PyTuple_Size(plain) != table->plain) return false;
  for (int i = 0; i < table->plain; ++i) call->plain[i] = keep(python.PyTuple_GetItem(plain, i));
  if (!take_conditions(call->conditions, python.PyTuple_GetItem(fields, 2))) return false;
  while (call->tensors < n)
    if (!take_tensor(table, call, python.PyTuple_GetItem(tensors, call->tensors))) return false;
  return call->results > 0 && !call->tensor[0].missing;
}

static void add(Table* table, Call* call) {
  const Layout& first = call->tensor[0].layout;
  DLTensor like = {};
  like.rank = first.rank;
  like.sizes = (int64_t*)first.sizes;
  std::atomic<const Call*>& bucket = table->bucket[bucket_of(like)];
  call->next = bucket.load();
  bucket.store(call, std::memory_order_release);
  ++table->calls;
}

static bool take_table(Table* table, Object* torch, Object* served, Object* op, Object* given, int plain,
                       Object* conditions) {
  Object** wanted[] = {&table->tensor, &table->is_neg, &table->grad_enabled, &table->requires_grad,
                       &table->increment_version};
  for (int i = 0; i < 5; ++i) *wanted[i] = keep(python.PyTuple_GetItem(torch, i));
  table->served = keep(served), table->op = keep(op);
  Object* capsule = python.PyObject_GetAttrString(table->tensor, "__dlpack_c_exchange_api__");
  if (!capsule) return false;
  table->exchange = (const Exchange*)python.PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
  python.Py_DecRef(capsule);  // what it points to stays
  if (!table->exchange || table->exchange->major != 1 || !table->exchange->read) return false;
  table->given = (int)python.PyTuple_Size(given);
  table->plain = plain;
  if (table->given > MAX_TENSORS || plain > MAX_PLAIN) return false;
  for (int i = 0; i < table->given; ++i) {
    table->inside[i] = (int)Words{given}[i];
    table->tensors += table->inside[i] ? table->inside[i] : 1;
  }
  return table->tensors <= MAX_TENSORS && take_conditions(table->conditions, conditions);
}

}  // namespace repeat
}  // namespace linattn

// A table of calls, and the function that makes them again: (capsule, function), or None where torch does not allow it.
//   torch       (torch.Tensor, its is_neg, is_grad_enabled, "requires_grad", increment_version)
//   served, op  served[op] becomes the backend of each call that is made again
//   given       for each argument with tensors how many it has if it is a tuple, or 0
//   plain       how many other arguments follow them
//   conditions  (function, argument or None, result) of what has to be as it is; results are compared by identity
extern "C" __attribute__((visibility("default"))) void* linattn_table(void* torch, void* served, void* op, void* given,
                                                                      int plain, void* conditions) {
  using namespace linattn::repeat;
  static std::atomic<bool> found{false};
  if (!found.load() && !find_python()) return nullptr;  // never: the caller is Python
  found.store(true);
  Table* table = (Table*)calloc(1, sizeof(Table));
  Object* pair = nullptr;
  if (table) {
    const bool taken = take_table(table, (Object*)torch, (Object*)served, (Object*)op, (Object*)given, plain,
                                  (Object*)conditions);
    Object* capsule = python.PyCapsule_New(table, nullptr, drop_table);
    Object* function = taken && capsule ? python.PyCFunction_NewEx(&method, capsule, nullptr) : nullptr;
    if (function && (pair = python.PyTuple_New(2))) {
      python.PyTuple_SetItem(pair, 0, keep(capsule));
      python.PyTuple_SetItem(pair, 1, keep(function));
    }
    drop(function), drop(capsule);
  }
  if (python.PyErr_Occurred()) python.PyErr_Clear();
  return pair ? pair : keep(python.none);
}

// Keep a call. Returns whether it was.
//   entry, block, words  as launched
//   place                where the device's index and the stream are in the block, or -1
//   alignment            of every address, in bytes
//   fields               (tensors, plain arguments, conditions, fail(status), backend); of each tensor, results that no
//                        argument stands for being last, (tensor or None, word or -1, flags, what makes it or None)
extern "C" __attribute__((visibility("default"))) int linattn_keep(void* capsule, int64_t (*entry)(const int64_t*),
                                                                   const int64_t* block, int words, int place,
                                                                   int64_t alignment, void* fields) {
  using namespace linattn::repeat;
  Table* table = table_of((Object*)capsule);
  Call* call = table && words <= MAX_WORDS && table->calls < MAX_CALLS ? (Call*)calloc(1, sizeof(Call)) : nullptr;
  if (call) {
    call->entry = entry, call->words = words, call->place = place, call->alignment = alignment;
    memcpy(call->block, block, words * sizeof *block);
    if (take_call(table, call, (Object*)fields))
      add(table, call);
    else
      drop(table, call), call = nullptr;
  }
  if (python.PyErr_Occurred()) python.PyErr_Clear();
  return call != nullptr;
}
