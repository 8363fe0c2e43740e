// Encoding of tensor maps, with what the driver refuses (CUDA driver API, cuTensorMapEncodeTiled).
#include "tensor_map.h"

namespace emu {
namespace {

enum Status { kSuccess = 0, kInvalidValue = 1, kNotSupported = 801 };  // CUresult

bool is_tiled_box(const MapType &type, unsigned rank, const uint64_t *dims, const uint64_t *strides,
                  const uint32_t *box) {
  for (unsigned i = 0; i < rank; i++) {
    if (dims[i] < 1 || dims[i] > uint64_t(1) << 32) return false;
    if (box[i] < 1 || box[i] > 256) return false;
    if (i + 1 < rank && (strides[i] % 16 || strides[i] >= uint64_t(1) << 40)) return false;
  }
  return box[0] * uint32_t(type.bytes) % kChunk == 0;
}

bool strides_are_one(unsigned rank, const uint32_t *element_strides) {
  for (unsigned i = 0; i < rank; i++)
    if (element_strides[i] != 1) return false;
  return true;
}

Status encode(TensorMap &map, int type, unsigned rank, void *global, const uint64_t *dims, const uint64_t *strides,
              const uint32_t *box, int swizzle, int oob_fill) {
  const MapType &element = kMapTypes[type];
  if (rank < 1 || rank > kMaxRank || !global || uintptr_t(global) % 16) return kInvalidValue;
  if (!is_tiled_box(element, rank, dims, strides, box)) return kInvalidValue;
  if (swizzle && box[0] * uint32_t(element.bytes) > kChunk << swizzle) return kInvalidValue;
  if (oob_fill && !element.nan) return kInvalidValue;
  map = TensorMap{};
  map.magic = kMapMagic;
  map.type = uint8_t(type);
  map.rank = uint8_t(rank);
  map.swizzle = uint8_t(swizzle);
  map.fill_nan = uint8_t(oob_fill);
  map.global = static_cast<char *>(global);
  for (unsigned i = 0; i < rank; i++) {
    map.dims_less_one[i] = uint32_t(dims[i] - 1);
    map.strides[i] = i ? strides[i - 1] : uint64_t(element.bytes);
    map.box[i] = uint16_t(box[i]);
  }
  return kSuccess;
}

}  // namespace
}  // namespace emu

using namespace emu;

extern "C" {

// strides are those of all dimensions but the first, as the driver takes them. 801 is for what only the emulator lacks.
int emu_tensor_map_encode(void *map, int type, unsigned rank, void *global, const uint64_t *dims,
                          const uint64_t *strides, const uint32_t *box, const uint32_t *element_strides, int interleave,
                          int swizzle, int /*l2_promotion*/, int oob_fill) {
  if (!map || uintptr_t(map) % 64 || type < 0 || interleave < 0 || swizzle < 0) return kInvalidValue;
  if (rank < 1 || rank > kMaxRank || oob_fill < 0 || oob_fill > 1) return kInvalidValue;
  if (type >= kMapTypeCount || interleave > 0 || swizzle > 3) return kNotSupported;
  if (!strides_are_one(rank, element_strides)) return kNotSupported;
  TensorMap encoded;
  const Status status = encode(encoded, type, rank, global, dims, strides, box, swizzle, oob_fill);
  if (status == kSuccess) memcpy(map, &encoded, sizeof encoded);
  return status;
}

}  // extern "C"
