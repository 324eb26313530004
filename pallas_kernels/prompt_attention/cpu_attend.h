// Attention of some queries of one kv head to the positions before them, over any kind of lanes.
// Included by cpu.cc inside a namespace, after a file of lanes.
//
// Positions are taken in blocks of 64 from the first on, and what a row has summed is rescaled
// whenever a block raises its largest score (online softmax, arXiv:1805.02867). A block that a row
// does not see changes nothing of it, not even a bit, so a row's result does not depend on which
// other rows are worked on with it.

// Scores of ROWS queries with a block of keys, k [size, kKeys].
template <int ROWS>
ZEN_LANES void score_tile(const Shape& s, const float* const* q, const float* k, Lanes (&sums)[ROWS][kTile]) {
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
    for (int t = 0; t < kTile; t++) sums[r][t] = fill(0.0f);
  for (int64_t i = 0; i < s.size; i++, k += kKeys) {
    Lanes key[kTile];
#pragma GCC unroll 4
    for (int t = 0; t < kTile; t++) key[t] = load(k + t * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++) {
      const Lanes one = fill(q[r][i]);
#pragma GCC unroll 4
      for (int t = 0; t < kTile; t++) sums[r][t] = fma(one, key[t], sums[r][t]);
    }
  }
}

// Turns a row's scores of a block into weights, keys outside [low, high) into 0; returns what the
// row's sums so far have to be multiplied by.
ZEN_LANES float weigh(float scale, int64_t low, int64_t high, const Lanes (&sums)[kTile], float* weights,
                      Row& row) {
  for (int t = 0; t < kTile; t++) store(weights + t * kLanes, mul(sums[t], fill(scale)));
  for (int64_t j = 0; j < std::min<int64_t>(low, kKeys); j++) weights[j] = -INFINITY;
  for (int64_t j = std::max<int64_t>(high, 0); j < kKeys; j++) weights[j] = -INFINITY;
  Lanes most = fill(row.largest);
  for (int t = 0; t < kTile; t++) most = larger(load(weights + t * kLanes), most);
  float lanes[kLanes];
  store(lanes, most);
  const float largest = *std::max_element(lanes, lanes + kLanes);
  store(lanes, exponential(fill(row.largest - largest)));
  const float factor = lanes[0];
  Lanes total = mul(load(row.total), fill(factor));
  for (int t = 0; t < kTile; t++) {
    const Lanes weight = exponential(sub(load(weights + t * kLanes), fill(largest)));
    store(weights + t * kLanes, weight);
    total = add(total, weight);
  }
  store(row.total, total);
  row.largest = largest;
  return factor;
}

// Adds `count` values, v [count, padded], times weights to y [ROWS, padded], TILE lanes from i on.
template <int ROWS, int TILE>
ZEN_LANES void gather_tile(const Shape& s, const float* weights, const float* factors, const float* v,
                           int64_t count, int64_t i, float* y) {
  Lanes sums[ROWS][TILE];
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
    for (int t = 0; t < TILE; t++)
      sums[r][t] = mul(load(y + r * s.padded + i + t * kLanes), fill(factors[r]));
  for (int64_t j = 0; j < count; j++) {
    Lanes value[TILE];
#pragma GCC unroll 4
    for (int t = 0; t < TILE; t++) value[t] = load(v + j * s.padded + i + t * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++) {
      const Lanes weight = fill(weights[r * kKeys + j]);
#pragma GCC unroll 4
      for (int t = 0; t < TILE; t++) sums[r][t] = fma(weight, value[t], sums[r][t]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
    for (int t = 0; t < TILE; t++) store(y + r * s.padded + i + t * kLanes, sums[r][t]);
}

// ROWS queries at `positions` (rising) with all that they see; y [ROWS][size].
template <int ROWS>
ZEN_TARGET void attend_rows(const Shape& s, const float* const* q, const int64_t* positions,
                            const float* keys, const float* values, float* room, float* const* y) {
  float* weights = room;
  float* sums = room + kRows * kKeys;
  Row rows[ROWS];
  float factors[ROWS];
  std::fill(sums, sums + ROWS * s.padded, 0.0f);
  const int64_t end = positions[ROWS - 1] + 1;
  const int64_t first = s.window ? std::max<int64_t>(0, positions[0] + 1 - s.window) / kKeys : 0;
  for (int64_t block = first; block * kKeys < end; block++) {
    const int64_t at = block * kKeys, count = std::min(kKeys, end - at);
    Lanes scores[ROWS][kTile];
    score_tile<ROWS>(s, q, keys + at * s.size, scores);
    for (int r = 0; r < ROWS; r++) {
      const int64_t low = s.window ? positions[r] + 1 - s.window - at : 0;
      factors[r] = weigh(s.scale, low, positions[r] + 1 - at, scores[r], weights + r * kKeys, rows[r]);
    }
    int64_t i = 0;
    for (; i + kTile * kLanes <= s.padded; i += kTile * kLanes)
      gather_tile<ROWS, kTile>(s, weights, factors, values + at * s.padded, count, i, sums);
    for (; i < s.padded; i += kLanes)
      gather_tile<ROWS, 1>(s, weights, factors, values + at * s.padded, count, i, sums);
  }
  for (int r = 0; r < ROWS; r++) {
    const float total = across(rows[r].total);
    for (int64_t i = 0; i < s.size; i++) y[r][i] = sums[r * s.padded + i] / total;
  }
}

inline void attend_some(int64_t count, const Shape& s, const float* const* q, const int64_t* positions,
                        const float* keys, const float* values, float* room, float* const* y) {
  switch (count) {
    case 6: return attend_rows<6>(s, q, positions, keys, values, room, y);
    case 5: return attend_rows<5>(s, q, positions, keys, values, room, y);
    case 4: return attend_rows<4>(s, q, positions, keys, values, room, y);
    case 3: return attend_rows<3>(s, q, positions, keys, values, room, y);
    case 2: return attend_rows<2>(s, q, positions, keys, values, room, y);
    default: return attend_rows<1>(s, q, positions, keys, values, room, y);
  }
}
