// Keys and values in pages: where a position of a row lies, and how a number is kept there. Included
// by kernels that write a cache and attend to it.
//
// A page holds positions one after another, [size][kv heads][head]. A row's page table says which
// page holds its first `size` positions, which the next, and so on. Numbers are float32, bfloat16,
// or 8 bits with a float32 scale for each position and kv head.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "cpu_lanes.h"
#include "xla/ffi/api/ffi.h"

namespace zen {

struct Int8 {
  int8_t code;
};
struct Float8 {  // e4m3: no infinity, 448 is the largest
  uint8_t code;
};

template <typename T>
constexpr bool kScaled = sizeof(T) == 1;

// To the nearest, ties to even; a NaN stays one.
inline void narrow(float value, uint16_t* bfloat16) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  const bool nan = (bits & 0x7FFFFFFF) > 0x7F800000;
  *bfloat16 = nan ? (bits >> 16 | 0x40) : (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}
inline void narrow(float value, float* same) { *same = value; }
inline void narrow(float value, Int8* code) { code->code = static_cast<int8_t>(std::nearbyint(value)); }
inline void narrow(float value, Float8* code) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  const uint32_t sign = bits >> 24 & 0x80, size = bits & 0x7FFFFFFF;
  uint32_t found;
  if (size < 0x3C800000)  // below 2^-6: steps of 2^-9
    found = static_cast<uint32_t>(std::nearbyint(std::fabs(value) * 512.0f));
  else
    found = ((size + 0x7FFFF + (size >> 20 & 1)) >> 20) - (120 << 3);
  code->code = static_cast<uint8_t>(sign | std::min<uint32_t>(found, 0x7E));
}

inline float widen(Int8 code) { return code.code; }
// In steps of whole numbers alone, so that a loop of it becomes vector code.
inline float widen(Float8 code) {
  const uint32_t size = code.code & 0x7F;
  const uint32_t whole = (size << 20) + (120u << 23);
  float small;  // below 2^-6: 2^-6 and the code's eighths of it, less 2^-6
  const uint32_t above = (size << 20) + (121u << 23);
  std::memcpy(&small, &above, sizeof(small));
  small -= 0.015625f;
  uint32_t bits;
  std::memcpy(&bits, &small, sizeof(bits));
  bits = (size < 8 ? bits : whole) | (code.code & 0x80u) << 24;
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

// Numbers from codes side by side, in the widest lanes that the processor has; each has the same bits
// in any.
#if defined(__x86_64__)
#define ZEN_CLONES __attribute__((target_clones("arch=x86-64-v4", "avx2", "default"), noinline))
#else
#define ZEN_CLONES
#endif
ZEN_CLONES static void widen_all(const Int8* codes, int64_t count, float scale, float* x) {
  for (int64_t i = 0; i < count; i++) x[i] = codes[i].code * scale;
}
ZEN_CLONES static void widen_all(const Float8* codes, int64_t count, float scale, float* x) {
  for (int64_t i = 0; i < count; i++) x[i] = widen(codes[i]) * scale;
}

inline float largest_code(Int8) { return 127.0f; }
inline float largest_code(Float8) { return 448.0f; }

// Keys, or values, of one layer; `scale` is [pages][size][kv heads], of 8 bits alone.
template <typename T>
struct Side {
  T* data;
  float* scale;
};

// Each row's pages, and how they are made.
struct Pages {
  const int32_t* table;  // [rows][columns]
  int64_t columns, there, size, kv_heads, head;

  int64_t positions() const { return columns * size; }
  int64_t stride() const { return kv_heads * head; }
  bool has(int64_t row, int64_t position) const {
    const int64_t page = table[row * columns + position / size];
    return page >= 0 && page < there;
  }
  // Whether there is a page for each of the positions first .. last.
  bool has_all(int64_t row, int64_t first, int64_t last) const {
    for (int64_t column = first / size; column <= last / size; column++)
      if (!has(row, column * size)) return false;
    return true;
  }
  // The position's number among those of all pages.
  int64_t place(int64_t row, int64_t position) const {
    return table[row * columns + position / size] * size + position % size;
  }

  // Keeps one head of a position.
  template <typename T>
  void write(const Side<T>& to, int64_t place, int64_t kv_head, const float* x) const {
    T* codes = to.data + place * stride() + kv_head * head;
    if constexpr (kScaled<T>) {
      float most = 0;
      for (int64_t i = 0; i < head; i++) {
        const float size = std::fabs(x[i]);
        if (size > most || size != size) most = size;
      }
      const float limit = largest_code(T());
      const float inverse = most > 0 && most <= kLargest ? limit / most : 0.0f;
      // A NaN anywhere makes a NaN of the whole head.
      to.scale[place * kv_heads + kv_head] = most / limit;
      for (int64_t i = 0; i < head; i++)
        narrow(inverse ? std::clamp(x[i] * inverse, -limit, limit) : 0.0f, codes + i);
    } else {
      for (int64_t i = 0; i < head; i++) narrow(x[i], codes + i);
    }
  }

  // Reads one head of a position, `step` floats apart.
  template <typename T>
  void read(const Side<T>& from, int64_t place, int64_t kv_head, float* x, int64_t step) const {
    const T* codes = from.data + place * stride() + kv_head * head;
    if constexpr (kScaled<T>) {
      const float scale = from.scale[place * kv_heads + kv_head];
      if (step == 1) return widen_all(codes, head, scale, x);
      for (int64_t i = 0; i < head; i++) x[i * step] = widen(codes[i]) * scale;
    } else {
      for (int64_t i = 0; i < head; i++) x[i * step] = widen(codes[i]);
    }
  }

 private:
  static constexpr float kLargest = -kLowest;
};

// Calls `of` with keys and values as what they are.
template <typename F>
void with_sides(xla::ffi::AnyBuffer& k, xla::ffi::AnyBuffer& v, float* k_scale, float* v_scale,
                const F& of) {
  const auto call = [&](auto kind) {
    using T = decltype(kind);
    of(Side<T>{static_cast<T*>(k.untyped_data()), k_scale},
       Side<T>{static_cast<T*>(v.untyped_data()), v_scale});
  };
  switch (k.element_type()) {
    case xla::ffi::BF16: return call(uint16_t());
    case xla::ffi::S8: return call(Int8());
    case xla::ffi::F8E4M3FN: return call(Float8());
    default: return call(float());
  }
}

}  // namespace zen
