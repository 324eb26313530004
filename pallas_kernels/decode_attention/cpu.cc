// What a decode step does between its products, on the CPU, through XLA's FFI: RMSNorm, and one
// token's attention to its row of a cache in pages.
//
// XLA's own code for that turns whole caches about before it multiplies, reads all S positions of a
// row, and is two dozen small programs a layer. Here a row's live positions are read once, a chunk
// of them at a time. A row's sums run in an order that depends on its own position alone: it has
// the same bits in any batch, in pages of any size, with any number of threads, and in AVX-512, AVX2
// or plain loops.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "cpu_lanes.h"
#include "cpu_pages.h"
#include "cpu_threads.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

using namespace zen;

constexpr int64_t kChunk = 128;            // positions whose weights are made and used together
constexpr int64_t kParallelBytes = 1 << 17;  // of cache, below which one thread is faster
constexpr int64_t kNormBlock = 1 << 14;     // elements whose norms one task makes
constexpr int64_t kTasksPerThread = 4;

// One layer's heads. `padded` is the size in whole lanes, `stride` the elements between positions.
struct Heads {
  int64_t group, size, padded, stride;
  float scale;
};

// Up to 16 positions of one head's keys or values, of which the first `skip` are not seen, and what
// will be read after them.
template <typename T>
struct Block {
  const T* here;
  const T* next;
  int64_t skip, count;
};

// Of some positions: the largest score and the sum of e^(score - largest).
struct Softmax {
  float largest, sum;
};

// What there is of each kind of lanes.
template <typename T>
struct Code {
  void (*attend_chunk)(const Heads&, const float*, const T* const*, int64_t, int64_t, int64_t,
                       float*, float*, Softmax*);
  void (*combine)(const Heads&, float*, const Softmax*, int64_t, int64_t, float*);
};

namespace plain {
#define ZEN_TARGET
#include "cpu_lanes_plain.h"
#include "cpu_exponential.h"
#include "cpu_attend.h"
#undef ZEN_TARGET
}  // namespace plain

#if defined(__x86_64__)
namespace avx2 {
#define ZEN_TARGET __attribute__((target("avx2,fma")))
#include "cpu_lanes_avx2.h"
#include "cpu_exponential.h"
#include "cpu_attend.h"
#undef ZEN_TARGET
}  // namespace avx2

namespace avx512 {
#define ZEN_TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq")))
#include "cpu_lanes_avx512.h"
#include "cpu_exponential.h"
#include "cpu_attend.h"
#undef ZEN_TARGET
}  // namespace avx512
#endif

template <typename T>
Code<T> choose(int64_t level) {
  switch (widest(level)) {
#if defined(__x86_64__)
    case kAvx512: return avx512::code<T>();
    case kAvx2: return avx2::code<T>();
#endif
    default: return plain::code<T>();
  }
}

// x / sqrt(mean(x^2) + eps) times a weight, of `size` elements.
void norm(const float* x, const float* weight, int64_t size, float eps, float* y) {
  float lanes[kLanes] = {};
  const int64_t whole = size / kLanes * kLanes;
  for (int64_t i = 0; i < whole; i += kLanes)
    for (int64_t j = 0; j < kLanes; j++) lanes[j] += x[i + j] * x[i + j];
  for (int64_t i = whole; i < size; i++) lanes[i - whole] += x[i] * x[i];
  const float factor = 1.0f / std::sqrt(across(lanes) / size + eps);
  for (int64_t i = 0; i < size; i++) y[i] = x[i] * factor * weight[i];
}

// Weights of a norm, `step` elements apart from row to row; 0 where all rows have one.
struct Norm {
  const float* weight;
  int64_t step;
};

Norm norm_of(ffi::Buffer<ffi::F32>& weight) {  // [0, 1 or rows, size]
  const auto dimensions = weight.dimensions();
  return {dimensions[0] ? weight.typed_data() : nullptr, dimensions[0] > 1 ? dimensions[1] : 0};
}

struct Problem {
  const float* qkv;  // [rows, kv_heads, group + 2, size]
  const float* cos;  // [rows, size / 2]
  const float* sin;
  const int32_t* positions;  // [rows]
  Norm q_norm, k_norm;
  float eps;
  int64_t window;     // positions seen, or 0 for all
  int64_t rows, kv_heads;
  Heads heads;
  Pages pages;
  const float* queries;  // [rows, kv_heads, group, padded], turned
  float* y;              // [rows, kv_heads, group, size]

  // The first position that row r sees, or -1 where it sees nothing.
  int64_t first(int64_t r) const {
    const int64_t position = positions[r];
    if (position < 0 || position >= pages.positions()) return -1;
    const int64_t from = window ? std::max<int64_t>(0, position + 1 - window) : 0;
    return pages.has_all(r, from, position) ? from : -1;
  }
};

// A head of row r, normed where the model does that, turned by its position's angles.
void turn(const Problem& p, int64_t r, const float* head, const Norm& by, float* out) {
  const int64_t half = p.heads.size / 2;
  if (by.weight) {
    norm(head, by.weight + r * by.step, p.heads.size, p.eps, out);
    head = out;
  }
  const float *cos = p.cos + r * half, *sin = p.sin + r * half;
  for (int64_t i = 0; i < half; i++) {
    const float left = head[i], right = head[half + i];
    out[i] = left * cos[i] - right * sin[i];
    out[half + i] = right * cos[i] + left * sin[i];
  }
}

// Every live row's queries, turned, in whole lanes; its new key and value go into the cache.
template <typename T>
std::vector<float> prepare(const Problem& p, const Side<T>& k, const Side<T>& v) {
  const Heads& h = p.heads;
  std::vector<float> queries(p.rows * p.kv_heads * h.group * h.padded), key(h.size);
  for (int64_t r = 0; r < p.rows; r++) {
    if (p.first(r) < 0) continue;
    const int64_t place = p.pages.place(r, p.positions[r]);
    for (int64_t head = 0; head < p.kv_heads; head++) {
      const int64_t unit = r * p.kv_heads + head;
      const float* fused = p.qkv + unit * (h.group + 2) * h.size;
      for (int64_t g = 0; g < h.group; g++)
        turn(p, r, fused + g * h.size, p.q_norm, &queries[(unit * h.group + g) * h.padded]);
      turn(p, r, fused + h.group * h.size, p.k_norm, key.data());
      p.pages.write(k, place, head, key.data());
      p.pages.write(v, place, head, fused + (h.group + 1) * h.size);
    }
  }
  return queries;
}

// Positions begin .. end - 1 of a row, of which those before `first` are not seen.
struct Chunk {
  int64_t row, begin, first, end;
};

// Every row's live positions, cut at multiples of kChunk, whatever the other rows are. A chunk begins
// with a whole block of positions, which no page divides.
std::vector<Chunk> chunks_of(const Problem& p) {
  std::vector<Chunk> chunks;
  for (int64_t r = 0; r < p.rows; r++) {
    int64_t first = p.first(r);
    if (first < 0) continue;
    const int64_t end = int64_t{p.positions[r]} + 1;
    for (int64_t next; first < end; first = next) {
      next = std::min(end, (first / kChunk + 1) * kChunk);
      chunks.push_back({r, first / kLanes * kLanes, first, next});
    }
  }
  return chunks;
}

// Where the blocks of a chunk lie: those of its keys, of its values, and the next two keys', all at
// one head. What is behind the last block of a row is never read, only asked for.
template <typename T>
void find_blocks(const Problem& p, const Side<T>& k, const Side<T>& v, const Chunk& chunk, int64_t head,
                 const T** blocks) {
  const auto at = [&](const Side<T>& side, int64_t position) {
    return side.data + p.pages.place(chunk.row, position) * p.heads.stride + head * p.heads.size;
  };
  for (int64_t s = chunk.begin; s < chunk.end; s += kLanes) *blocks++ = at(k, s);
  for (int64_t s = chunk.begin; s < chunk.end; s += kLanes) *blocks++ = at(v, s);
  for (int64_t i = 0; i < 2; i++) {
    const int64_t s = std::min<int64_t>(chunk.end + i * kLanes, p.positions[chunk.row]);
    blocks[i] = at(k, s);
  }
}

// The same for a cache of 8 bits: some heads of a chunk as floats, `room` [2][kChunk][heads][size].
template <typename T>
void widen_blocks(const Problem& p, const Side<T>& k, const Side<T>& v, const Chunk& chunk, int64_t head,
                  int64_t heads, float* room, const float** blocks) {
  const int64_t size = p.heads.size, stride = heads * size;
  for (const Side<T>* side : {&k, &v}) {
    for (int64_t s = chunk.begin; s < chunk.end; s++) {
      const float* here = room + (s - chunk.begin) * stride;
      if ((s - chunk.begin) % kLanes == 0) *blocks++ = here;
      if (s < chunk.first) continue;
      const int64_t place = p.pages.place(chunk.row, s);
      for (int64_t n = 0; n < heads; n++)
        p.pages.read(*side, place, head + n, room + (s - chunk.begin) * stride + n * size, 1);
    }
    room += kChunk * stride;
  }
  blocks[0] = blocks[1] = blocks[-1];
}

// Attention of every row's queries to each of its chunks, apart; `sums` and `softmax` are
// [chunks, kv heads, G, ...].
template <typename T>
void attend_chunks(const Problem& p, ffi::ThreadPool& pool, int64_t level, const Side<T>& k,
                   const Side<T>& v, const std::vector<Chunk>& chunks, float* sums, Softmax* softmax) {
  // What the loops over lanes read.
  using Read = std::conditional_t<kScaled<T>, float, T>;
  const Code<Read> code = choose<Read>(level);
  const Heads& h = p.heads;
  const int64_t count = chunks.size();
  int64_t live = 0;
  for (const Chunk& chunk : chunks) live += chunk.end - chunk.begin;
  const bool alone = 2 * live * h.stride * int64_t{sizeof(T)} < kParallelBytes;
  // With few chunks, a chunk's heads are shared out too.
  const int64_t wanted = alone ? 1 : kTasksPerThread * pool.num_threads();
  const int64_t parts = std::clamp<int64_t>(wanted / std::max<int64_t>(1, count), 1, p.kv_heads);
  const int64_t share = (p.kv_heads + parts - 1) / parts;
  share_out(pool, count * parts, alone, [&](int64_t i) {
    const Chunk& chunk = chunks[i / parts];
    const int64_t head = i % parts * share, heads = std::min(share, p.kv_heads - head);
    if (heads <= 0) return;
    const int64_t of_row = (chunk.row * p.kv_heads + head) * h.group;
    const int64_t of_chunk = (i / parts * p.kv_heads + head) * h.group;
    thread_local std::vector<float> weights, room;
    weights.resize(heads * h.group * kChunk);
    const Read* blocks[2 * kChunk / kLanes + 2];
    Heads lying = h;
    if constexpr (kScaled<T>) {
      room.resize(2 * kChunk * heads * h.size);
      widen_blocks(p, k, v, chunk, head, heads, room.data(), blocks);
      lying.stride = heads * h.size;
    } else {
      find_blocks(p, k, v, chunk, head, blocks);
    }
    code.attend_chunk(lying, p.queries + of_row * h.padded, blocks, chunk.end - chunk.begin,
                      chunk.first - chunk.begin, heads, weights.data(), sums + of_chunk * h.padded,
                      softmax + of_chunk);
  });
}

template <typename T>
void attend(Problem& p, ffi::ThreadPool& pool, int64_t level, const Side<T>& k, const Side<T>& v) {
  const Heads& h = p.heads;
  const int64_t heads = p.kv_heads * h.group;
  const std::vector<float> queries = prepare(p, k, v);
  p.queries = queries.data();
  const std::vector<Chunk> chunks = chunks_of(p);
  const int64_t count = chunks.size();
  std::vector<float> sums(count * heads * h.padded);
  std::vector<Softmax> softmax(count * heads);
  attend_chunks(p, pool, level, k, v, chunks, sums.data(), softmax.data());
  std::fill(p.y, p.y + p.rows * heads * h.size, 0.0f);
  const auto combine = choose<float>(level).combine;
  for (int64_t first = 0, next; first < count; first = next) {
    const int64_t row = chunks[first].row;
    for (next = first; next < count && chunks[next].row == row;) next++;
    for (int64_t n = 0; n < heads; n++)
      combine(h, &sums[(first * heads + n) * h.padded], &softmax[first * heads + n], next - first,
              heads, p.y + (row * heads + n) * h.size);
  }
}

ffi::Error attend_impl(ffi::ThreadPool pool, float eps, int64_t window, int64_t level,
                       ffi::Buffer<ffi::F32> qkv, ffi::Buffer<ffi::F32> cos,
                       ffi::Buffer<ffi::F32> sin, ffi::Buffer<ffi::S32> positions,
                       ffi::Buffer<ffi::S32> table, ffi::Buffer<ffi::F32> q_norm,
                       ffi::Buffer<ffi::F32> k_norm, ffi::AnyBuffer, ffi::AnyBuffer,
                       ffi::Buffer<ffi::F32>, ffi::Buffer<ffi::F32>, ffi::ResultBuffer<ffi::F32> y,
                       ffi::Result<ffi::AnyBuffer> k, ffi::Result<ffi::AnyBuffer> v,
                       ffi::ResultBuffer<ffi::F32> k_scale, ffi::ResultBuffer<ffi::F32> v_scale) {
  const auto qd = qkv.dimensions();
  Problem p{};
  p.qkv = qkv.typed_data();
  p.cos = cos.typed_data();
  p.sin = sin.typed_data();
  p.positions = positions.typed_data();
  p.q_norm = norm_of(q_norm);
  p.k_norm = norm_of(k_norm);
  p.eps = eps;
  p.window = window;
  p.rows = qd[0];
  p.kv_heads = qd[1];
  p.heads.group = qd[2] - 2;
  p.heads.size = qd[3];
  p.heads.padded = (qd[3] + kLanes - 1) / kLanes * kLanes;
  p.heads.stride = qd[1] * qd[3];
  p.heads.scale = 1.0 / std::sqrt(static_cast<double>(qd[3]));
  const auto kd = k->dimensions();
  p.pages = {table.typed_data(), table.dimensions()[1], kd[0], kd[1], kd[2], kd[3]};
  p.y = y->typed_data();
  with_sides(*k, *v, k_scale->typed_data(), v_scale->typed_data(),
             [&](const auto& keys, const auto& values) { attend(p, pool, level, keys, values); });
  return ffi::Error::Success();
}

ffi::Error norm_impl(ffi::ThreadPool pool, float eps, ffi::Buffer<ffi::F32> x,
                     ffi::Buffer<ffi::F32> weight, ffi::ResultBuffer<ffi::F32> y) {
  const int64_t size = x.dimensions().back(), rows = x.element_count() / size;
  const int64_t in_block = std::max<int64_t>(1, kNormBlock / size);
  const int64_t of_weight = rows / weight.dimensions()[0];
  const int64_t blocks = (rows + in_block - 1) / in_block;
  share_out(pool, blocks, blocks < 2, [&](int64_t b) {
    for (int64_t r = b * in_block; r < std::min(rows, (b + 1) * in_block); r++)
      norm(x.typed_data() + r * size, weight.typed_data() + r / of_weight * size, size, eps,
           y->typed_data() + r * size);
  });
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(ZenDecodeAttention, attend_impl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Attr<float>("eps")
                                  .Attr<int64_t>("window")
                                  .Attr<int64_t>("level")
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(ZenRmsNorm, norm_impl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Attr<float>("eps")
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>());
