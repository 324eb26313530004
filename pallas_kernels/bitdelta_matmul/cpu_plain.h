// Few rows in plain loops: the same sums in the same order as with AVX-512, for other processors.

#pragma once

#include "cpu_rows.h"
#include "cpu_tables.h"

namespace zen {

// Lanes [16] of one output and one row of a tile of `count`.
ZEN_INLINE void plain_lanes(const Problem& p, const float* x, int64_t count, int64_t o, float* lanes) {
  for (int l = 0; l < kLanes; l++) lanes[l] = 0;
  float w[kStep];
  for (int64_t s = 0; s < p.steps(); s++, x += count * kStep) {
    const int64_t left = std::min(kStep, p.inputs - s * kStep);
    for (int64_t k = 0; k < kStep; k++) w[k] = 0;
    if (p.w_bf16) {
      const uint16_t* from = static_cast<const uint16_t*>(p.w) + o * p.inputs + s * kStep;
      for (int64_t k = 0; k < left; k++) w[(k & 1) * kLanes + (k >> 1)] = widen(from[k]);
    } else {
      std::memcpy(w, static_cast<const float*>(p.w) + o * p.inputs + s * kStep, left * 4);
    }
    for (int half = 0; half < 2; half++)
      for (int l = 0; l < kLanes; l++)
        lanes[l] = __builtin_fmaf(w[half * kLanes + l], x[half * kLanes + l], lanes[l]);
  }
}

// What the bytes [begin, end) of signs look up.
ZEN_INLINE int32_t plain_look_up(const uint8_t* bits, const int8_t* table, int64_t begin, int64_t end) {
  int32_t sum = 0;
  for (int64_t j = begin; j < end; j++) {
    const int8_t* t = table + j / 4 * kTable + j % 4 * 16;
    sum += t[bits[j] & 15] + t[64 + (bits[j] >> 4)];
  }
  return sum;
}

ZEN_INLINE int32_t plain_sum(const uint8_t* bits, const Entry& entry, int64_t bytes) {
  int32_t sum = plain_look_up(bits, entry.fine, 0, bytes);
  for (int64_t i = 0; i < entry.count; i++) {
    const int64_t at = 4 * entry.words[i];
    sum += kCoarse * plain_look_up(bits, entry.coarse, at, std::min(at + 4, bytes));
  }
  return sum;
}

ZEN_INLINE void plain_block_body(const Problem& p, const Rows<float>& rows, const Tables& tables,
                                 const Block& block) {
  for (int64_t o = block.begin; o < block.end; o++)
    for (int64_t t = 0; t < rows.tiles(); t++) {
      const int64_t first = rows.begin(t), count = rows.begin(t + 1) - first;
      for (int64_t b = 0; b < count; b++) {
        float lanes[kLanes];
        plain_lanes(p, rows.data(t) + b * kStep, count, o, lanes);
        p.y[(first + b) * p.outputs + o] = across(lanes);
      }
    }
  for (const Group& group : tables.groups())
    for (int64_t level = 0; level < p.levels; level++)
      for (int64_t e = group.begin; e < group.end; e++) {
        const Entry& entry = tables.entries()[e];
        for (int64_t o = block.begin; o < block.end; o++) {
          const int64_t at = p.at(group.slot, level, o);
          const float sum = float(plain_sum(p.bits + at * p.bytes, entry, p.bytes));
          p.y[entry.row * p.outputs + o] += sum * entry.scale * p.scale[at];
        }
      }
}

inline void plain_block(const Problem& p, const Rows<float>& rows, const Tables& tables,
                        const Block& block) {
  plain_block_body(p, rows, tables, block);
}

#if defined(ZEN_AVX2)
// A call of fmaf for every product would be a hundred times slower.
ZEN_AVX2 inline void avx2_block(const Problem& p, const Rows<float>& rows, const Tables& tables,
                                const Block& block) {
  plain_block_body(p, rows, tables, block);
}
#endif

}  // namespace zen
