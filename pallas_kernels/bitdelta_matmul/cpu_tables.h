// Products with signs by table: four inputs have 16 sums, looked up by four packed bits at once.
//
// A table's entry is +-x0 +-x1 +-x2 +-x3 in 8 bits, with one scale a row of x: the largest sum of
// four is 127. What rounding leaves of a row is known beforehand: each group of four is off by a
// step's uniform error, so that the whole is off by step sqrt(groups / 12) beside |x|. While that
// is more than the error allowed, a further table holds what is left in steps of 1/254, up to
// float32's own precision with three. Sums of entries are whole numbers, the same in any order.
//
// (Table look-up for low-bit weights: T-MAC, arXiv:2407.00088.)

#pragma once

#include <algorithm>
#include <vector>

#include "cpu_rows.h"

namespace zen {

constexpr float kError = 0.015f;      // of the delta term, root mean square, over a bfloat16 base
constexpr float kErrorExact = 1e-6f;  // over a float32 base, which is there to be compared with
constexpr float kFiner = 254.0f;      // steps of a further table in one of the one before
constexpr int kMostTables = 3;
constexpr int64_t kTable = 128;       // bytes of the tables of 32 inputs

// One row's table and what it belongs to.
struct Entry {
  const int8_t* table;  // [steps, 2, 4, 16]: low and high half of byte k, its 16 sums
  float scale;
  int64_t row;
};

// Entries of one variant, one after the other.
struct Group {
  int32_t slot;
  int64_t begin, end;
};

// Sums of four inputs with the signs of 16 codes, in this order of additions.
inline void sums_of_four(const float* x, float* sums) {
  for (int code = 0; code < 16; code++) {
    float sum = code & 1 ? x[0] : -x[0];
    for (int k = 1; k < 4; k++) sum += code >> k & 1 ? x[k] : -x[k];
    sums[code] = sum;
  }
}

// Where the table of a group of four inputs lies.
inline int64_t table_at(int64_t group) {
  const int64_t step = group / 8, part = group % 8;
  return step * kTable + (part & 1) * 64 + (part >> 1) * 16;
}

// How a row's tables are made: table d counts in steps of step[d].
struct Steps {
  float step[kMostTables], inverse[kMostTables];
  int count;
};

inline int8_t rounded(float value) { return static_cast<int8_t>(std::nearbyintf(value)); }

// tables: one behind the other, `bytes` each.
inline void plain_fill(const float* x, int64_t groups, const Steps& steps, int8_t* tables, int64_t bytes) {
  for (int64_t g = 0; g < groups; g++) {
    float left[16];
    sums_of_four(x + 4 * g, left);
    for (int code = 0; code < 16; code++)
      for (int d = 0; d < steps.count; d++) {
        const int8_t q = rounded(left[code] * steps.inverse[d]);
        tables[d * bytes + table_at(g) + code] = q;
        left[code] = std::fma(-steps.step[d], float(q), left[code]);
      }
  }
}

#if defined(__x86_64__)
__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq"))) inline void avx512_fill(
    const float* x, int64_t groups, const Steps& steps, int8_t* tables, int64_t bytes) {
  __mmask16 minus[4];
  for (int k = 0; k < 4; k++) {
    minus[k] = 0;
    for (int code = 0; code < 16; code++) minus[k] |= (code >> k & 1 ? 0 : 1) << code;
  }
  const __m512i sign = _mm512_set1_epi32(0x80000000);
  for (int64_t g = 0; g < groups; g++) {
    __m512 left;
    for (int k = 0; k < 4; k++) {
      const __m512i v = _mm512_castps_si512(_mm512_set1_ps(x[4 * g + k]));
      const __m512 signed_x = _mm512_castsi512_ps(_mm512_mask_xor_epi32(v, minus[k], v, sign));
      left = k ? _mm512_add_ps(left, signed_x) : signed_x;
    }
    for (int d = 0; d < steps.count; d++) {
      const __m512i q = _mm512_cvtps_epi32(_mm512_mul_ps(left, _mm512_set1_ps(steps.inverse[d])));
      __m128i* to = reinterpret_cast<__m128i*>(tables + d * bytes + table_at(g));
      _mm_storeu_si128(to, _mm512_cvtepi32_epi8(q));
      left = _mm512_fmadd_ps(_mm512_set1_ps(-steps.step[d]), _mm512_cvtepi32_ps(q), left);
    }
  }
}
#endif

// All rows' tables, grouped by variant; rows of the base have none.
class Tables {
 public:
  // fill(i) has to be called for every i below rows(), in any order, and finish() then.
  // wanted: says of a slot whether its rows need tables.
  template <typename Wanted>
  Tables(const Problem& p, bool avx512, Scratch& scratch, const Wanted& wanted)
      : p_(p), avx512_(avx512) {
    for (int64_t r = 0; r < p.rows; r++)
      if (p.slot(r) >= 0 && wanted(p.slot(r))) order_.push_back(r);
    std::stable_sort(order_.begin(), order_.end(),
                     [&p](int64_t a, int64_t b) { return p.slot(a) < p.slot(b); });
    bytes_ = p.steps() * kTable;
    memory_ = scratch.get<int8_t>(kMostTables * rows() * bytes_);
    steps_.resize(order_.size());
  }

  int64_t rows() const { return static_cast<int64_t>(order_.size()); }

  void fill(int64_t i) {
    const float* x = p_.x + order_[i] * p_.inputs;
    int8_t* tables = memory_ + kMostTables * i * bytes_;
    steps_[i] = measure(x);
    if (!(steps_[i].step[0] > 0)) {  // nothing to count
      std::memset(tables, 0, bytes_);
      return;
    }
    const int64_t whole = p_.inputs / kStep * 8;
    groups(x, whole, steps_[i], tables);
    if (whole * 4 == p_.inputs) return;
    float last[kStep] = {};
    std::memcpy(last, x + 4 * whole, (p_.inputs - 4 * whole) * sizeof(float));
    groups(last, 8, steps_[i], tables + whole / 8 * kTable);
  }

  void finish() {
    for (int64_t i = 0; i < rows(); i++) {
      const int64_t r = order_[i];
      if (groups_.empty() || groups_.back().slot != p_.slot(r))
        groups_.push_back({p_.slot(r), count(), count()});
      for (int d = 0; d < steps_[i].count; d++)
        entries_.push_back({memory_ + (kMostTables * i + d) * bytes_, steps_[i].step[d], r});
      groups_.back().end = count();
    }
  }

  const std::vector<Group>& groups() const { return groups_; }
  const Entry* entries() const { return entries_.data(); }

 private:
  int64_t count() const { return static_cast<int64_t>(entries_.size()); }

  void groups(const float* x, int64_t count, const Steps& steps, int8_t* tables) const {
#if defined(__x86_64__)
    if (avx512_) return avx512_fill(x, count, steps, tables, bytes_);
#endif
    plain_fill(x, count, steps, tables, bytes_);
  }

  // How fine a row's tables have to be. A row that is not finite has no product: the base's sum is
  // not finite either.
  Steps measure(const float* x) const {
    float most = 0, squares = 0;
    bool finite = true;
    for (int64_t i = 0; i < p_.inputs; i += 4) {
      float v[4] = {};
      for (int64_t k = 0; k < std::min<int64_t>(4, p_.inputs - i); k++) v[k] = x[i + k];
      const float sum = std::fabs(v[0]) + std::fabs(v[1]) + std::fabs(v[2]) + std::fabs(v[3]);
      const float four = v[0] * v[0] + v[1] * v[1] + v[2] * v[2] + v[3] * v[3];
      finite = finite && std::isfinite(sum);
      most = std::max(most, sum);
      squares += four;
    }
    if (!finite) return {{NAN}, {0}, 1};
    if (most < 1e-30f) return {{0}, {0}, 1};
    const float allowed = p_.w_bf16 ? kError : kErrorExact;
    const float off = std::sqrt((p_.inputs / 4 + 1) / (12 * squares));  // of a step, beside |x|
    Steps steps{{most / 127}, {127 / most}, 1};
    for (int d = 1; d < kMostTables && off * steps.step[d - 1] > allowed; d = steps.count) {
      steps.step[d] = steps.step[d - 1] / kFiner;
      steps.inverse[d] = steps.inverse[d - 1] * kFiner;
      steps.count = d + 1;
    }
    return steps;
  }

  const Problem& p_;
  bool avx512_;
  int64_t bytes_;
  int8_t* memory_;
  std::vector<int64_t> order_;
  std::vector<Steps> steps_;
  std::vector<Entry> entries_;
  std::vector<Group> groups_;
};

}  // namespace zen
