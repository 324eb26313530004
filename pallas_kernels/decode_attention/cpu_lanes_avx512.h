// Sixteen floats in one register of AVX-512. Included by cpu.cc inside a namespace; see
// cpu_lanes_plain.h for what each function means.

using Lanes = __m512;

ZEN_LANES Lanes fill(float x) { return _mm512_set1_ps(x); }
ZEN_LANES Lanes load(const float* p) { return _mm512_loadu_ps(p); }
ZEN_LANES Lanes load(const uint16_t* p) {
  const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}
ZEN_LANES Lanes load_part(const float* p, int64_t n) {
  return _mm512_maskz_loadu_ps((1u << n) - 1, p);
}
ZEN_LANES Lanes load_part(const uint16_t* p, int64_t n) {
  const __m256i half = _mm256_maskz_loadu_epi16((1u << n) - 1, p);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}
ZEN_LANES void store(float* p, Lanes a) { _mm512_storeu_ps(p, a); }
ZEN_LANES Lanes add(Lanes a, Lanes b) { return _mm512_add_ps(a, b); }
ZEN_LANES Lanes sub(Lanes a, Lanes b) { return _mm512_sub_ps(a, b); }
ZEN_LANES Lanes mul(Lanes a, Lanes b) { return _mm512_mul_ps(a, b); }
ZEN_LANES Lanes fma(Lanes a, Lanes b, Lanes c) { return _mm512_fmadd_ps(a, b, c); }
ZEN_LANES Lanes larger(Lanes a, Lanes b) { return _mm512_max_ps(a, b); }

ZEN_LANES Lanes power_of_two(Lanes shifted) {
  const __m512i n = _mm512_add_epi32(_mm512_castps_si512(shifted), _mm512_set1_epi32(127));
  return _mm512_castsi512_ps(_mm512_slli_epi32(n, 23));
}
ZEN_LANES Lanes zero_below(Lanes x, float limit, Lanes value) {
  const __mmask16 kept = _mm512_cmp_ps_mask(x, _mm512_set1_ps(limit), _CMP_NLT_UQ);
  return _mm512_maskz_mov_ps(kept, value);
}

// Both halves of a and of b added up, then quarters, and so on: four levels make of sixteen
// registers the sixteen sums across them.
template <int kLow, int kHigh>
ZEN_LANES Lanes merge_blocks(Lanes a, Lanes b) {
  return add(_mm512_shuffle_f32x4(a, b, kLow), _mm512_shuffle_f32x4(a, b, kHigh));
}
template <int kLow, int kHigh>
ZEN_LANES Lanes merge(Lanes a, Lanes b) {
  return add(_mm512_shuffle_ps(a, b, kLow), _mm512_shuffle_ps(a, b, kHigh));
}
ZEN_LANES Lanes across16(const Lanes* x) {
  Lanes quarter[4];
#pragma GCC unroll 4
  for (int j = 0; j < 4; j++)
    quarter[j] = merge_blocks<0x88, 0xDD>(merge_blocks<0x44, 0xEE>(x[j], x[4 + j]),
                                          merge_blocks<0x44, 0xEE>(x[8 + j], x[12 + j]));
  return merge<0x88, 0xDD>(merge<0x44, 0xEE>(quarter[0], quarter[1]),
                           merge<0x44, 0xEE>(quarter[2], quarter[3]));
}
