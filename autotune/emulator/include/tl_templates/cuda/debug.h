// T.print and T.device_assert. Lines have the form that TileLang prints.
#pragma once
#include "common.h"

namespace emu {

EMU_UNCHECKED inline void print_place(const char *message) {
  uint3 block = block_index(), thread = thread_index();
  printf("msg='%s' BlockIdx=(%u, %u, %u), ThreadIdx=(%u, %u, %u)", message, block.x, block.y, block.z, thread.x,
         thread.y, thread.z);
}

template <class T>
EMU_UNCHECKED void print_value(T value) {
  if constexpr (std::is_same_v<T, bool>) {
    printf("dtype=bool value=%s\n", value ? "true" : "false");
  } else if constexpr (std::is_pointer_v<T>) {
    printf("dtype=pointer value=%p\n", (const void *)value);
  } else if constexpr (std::is_integral_v<T> && std::is_signed_v<T>) {
    printf("dtype=int%d value=%lld\n", int(8 * sizeof(T)), (long long)value);
  } else if constexpr (std::is_integral_v<T>) {
    printf("dtype=uint%d value=%llu\n", int(8 * sizeof(T)), (unsigned long long)value);
  } else {
    const char *name = std::is_same_v<T, half_t>       ? "half_t"
                       : std::is_same_v<T, bfloat16_t> ? "bfloat16_t"
                       : std::is_same_v<T, float>      ? "float"
                                                       : "double";
    printf("dtype=%s value=%f\n", name, double(value));
  }
}

}  // namespace emu

EMU_UNCHECKED inline void debug_print_msg(const char *message) {
  emu::print_place(message);
  printf("\n");
}

template <class T>
EMU_UNCHECKED void debug_print_var(const char *message, T value) {
  emu::print_place(message);
  printf(": ");
  emu::print_value(value);
}

template <class T>
EMU_UNCHECKED void debug_print_buffer_value(const char *message, const char *buffer, int index, T value) {
  emu::print_place(message);
  printf(": buffer=%s, index=%d, ", buffer, index);
  emu::print_value(value);
}

TL_DEVICE void device_assert(bool condition) {
  if (!condition) emu_fail("device_assert failed");
}

TL_DEVICE void device_assert_with_msg(bool condition, const char *message) {
  if (condition) return;
  char text[256];
  snprintf(text, sizeof text, "device_assert failed: %s", message);
  emu_fail(text);
}
