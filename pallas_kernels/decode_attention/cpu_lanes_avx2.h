// Sixteen floats in two registers of AVX2. Included by cpu.cc inside a namespace; see
// cpu_lanes_plain.h for what each function means.

struct Lanes {
  __m256 low, high;
};

ZEN_LANES __m256 widen(__m128i half) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}
ZEN_LANES Lanes fill(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
ZEN_LANES Lanes load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
ZEN_LANES Lanes load(const uint16_t* p) {
  return {widen(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
          widen(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)))};
}
template <typename T>
ZEN_LANES Lanes load_part(const T* p, int64_t n) {
  T part[kLanes] = {};
  std::memcpy(part, p, n * sizeof(T));
  return load(part);
}
ZEN_LANES void store(float* p, Lanes a) {
  _mm256_storeu_ps(p, a.low);
  _mm256_storeu_ps(p + 8, a.high);
}
ZEN_LANES Lanes add(Lanes a, Lanes b) {
  return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)};
}
ZEN_LANES Lanes sub(Lanes a, Lanes b) {
  return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)};
}
ZEN_LANES Lanes mul(Lanes a, Lanes b) {
  return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)};
}
ZEN_LANES Lanes fma(Lanes a, Lanes b, Lanes c) {
  return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
ZEN_LANES Lanes larger(Lanes a, Lanes b) {
  return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)};
}

ZEN_LANES __m256 power_of_two(__m256 shifted) {
  const __m256i n = _mm256_add_epi32(_mm256_castps_si256(shifted), _mm256_set1_epi32(127));
  return _mm256_castsi256_ps(_mm256_slli_epi32(n, 23));
}
ZEN_LANES Lanes power_of_two(Lanes shifted) {
  return {power_of_two(shifted.low), power_of_two(shifted.high)};
}
ZEN_LANES Lanes zero_below(Lanes x, float limit, Lanes value) {
  const __m256 bound = _mm256_set1_ps(limit);
  return {_mm256_and_ps(_mm256_cmp_ps(x.low, bound, _CMP_NLT_UQ), value.low),
          _mm256_and_ps(_mm256_cmp_ps(x.high, bound, _CMP_NLT_UQ), value.high)};
}

// As with AVX-512, in registers of half the size.
template <int kLow, int kHigh>
ZEN_LANES __m256 merge(__m256 a, __m256 b) {
  return _mm256_add_ps(_mm256_shuffle_ps(a, b, kLow), _mm256_shuffle_ps(a, b, kHigh));
}
ZEN_LANES __m256 across8(const Lanes* x) {
  __m256 half[8], quarter[4];
#pragma GCC unroll 8
  for (int j = 0; j < 8; j++) half[j] = _mm256_add_ps(x[j].low, x[j].high);
#pragma GCC unroll 4
  for (int j = 0; j < 4; j++)
    quarter[j] = _mm256_add_ps(_mm256_permute2f128_ps(half[j], half[4 + j], 0x20),
                               _mm256_permute2f128_ps(half[j], half[4 + j], 0x31));
  return merge<0x88, 0xDD>(merge<0x44, 0xEE>(quarter[0], quarter[1]),
                           merge<0x44, 0xEE>(quarter[2], quarter[3]));
}
ZEN_LANES Lanes across16(const Lanes* x) { return {across8(x), across8(x + 8)}; }
