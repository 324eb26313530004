// Sixteen floats in an array, for any processor. Included by cpu.cc inside a namespace.
//
// The three files of lanes hold the same functions; what each does to a lane is exact or correctly
// rounded, so that all three give the same bits.

struct Lanes {
  float x[kLanes];
};

template <typename F>
ZEN_LANES Lanes each(F of) {
  Lanes r;
  for (int i = 0; i < kLanes; i++) r.x[i] = of(i);
  return r;
}

ZEN_LANES Lanes fill(float x) {
  return each([=](int) { return x; });
}
ZEN_LANES Lanes load(const float* p) {
  return each([=](int i) { return p[i]; });
}
ZEN_LANES Lanes load(const uint16_t* p) {  // of bfloat16
  return each([=](int i) { return widen(p[i]); });
}
// The first n of 16, zeros after them.
template <typename T>
ZEN_LANES Lanes load_part(const T* p, int64_t n) {
  T part[kLanes] = {};
  std::memcpy(part, p, n * sizeof(T));
  return load(part);
}
ZEN_LANES void store(float* p, const Lanes& a) { std::memcpy(p, a.x, sizeof(a.x)); }
ZEN_LANES Lanes add(const Lanes& a, const Lanes& b) {
  return each([&](int i) { return a.x[i] + b.x[i]; });
}
ZEN_LANES Lanes sub(const Lanes& a, const Lanes& b) {
  return each([&](int i) { return a.x[i] - b.x[i]; });
}
ZEN_LANES Lanes mul(const Lanes& a, const Lanes& b) {
  return each([&](int i) { return a.x[i] * b.x[i]; });
}
ZEN_LANES Lanes fma(const Lanes& a, const Lanes& b, const Lanes& c) {  // a b + c, rounded once
  return each([&](int i) { return __builtin_fmaf(a.x[i], b.x[i], c.x[i]); });
}
ZEN_LANES Lanes larger(const Lanes& a, const Lanes& b) {
  return each([&](int i) { return a.x[i] > b.x[i] ? a.x[i] : b.x[i]; });
}
// 2^n for a whole number n of -126 .. 127, given n + 1.5 * 2^23, whose lowest bits are n's.
ZEN_LANES Lanes power_of_two(const Lanes& shifted) {
  return each([&](int i) {
    uint32_t bits;
    float power;
    std::memcpy(&bits, &shifted.x[i], sizeof(bits));
    bits = (bits + 127) << 23;
    std::memcpy(&power, &bits, sizeof(power));
    return power;
  });
}
// The value, but 0 where x is below the limit; where x is NaN, the value.
ZEN_LANES Lanes zero_below(const Lanes& x, float limit, const Lanes& value) {
  return each([&](int i) { return x.x[i] < limit ? 0.0f : value.x[i]; });
}
// The sum across each of sixteen, in the order of `across`.
ZEN_LANES Lanes across16(const Lanes* x) {
  return each([=](int i) { return across(x[i].x); });
}
