// The fused products on the CPU, through XLA's FFI: y = x W^T + sum over levels of alpha (x S^T).
//
// Few rows (a decode step): both sums apart, the second with 8-bit tables (cpu_tables.h). Many rows
// (a prompt): the effective weight, a tile at a time (cpu_many.h). Which of the two is the caller's
// choice and not the number of rows', so that a row's result has the same bits in any batch.
// AVX-512 by hand, chosen at run time; elsewhere the same sums in plain loops.

#include "../cpu_threads.h"
#include "cpu_avx512.h"
#include "cpu_many.h"
#include "cpu_plain.h"
#include "cpu_prompt.h"

namespace ffi = xla::ffi;

namespace zen {
namespace {

constexpr int64_t kParallelWork = 1 << 17;  // multiplications below which one thread is faster

struct Processor {
  bool avx512 = false, bf16 = false, avx2 = false;
};

Processor processor(bool portable) {
  Processor found;
#if defined(__x86_64__)
  if (portable) return found;
  found.avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                 __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                 __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vnni");
  found.bf16 = found.avx512 && __builtin_cpu_supports("avx512bf16");
  found.avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#endif
  return found;
}

// Makes p.x of rows in bfloat16.
void widen_rows(Problem& p, ffi::ThreadPool& pool) {
  if (!p.x16) return;
  thread_local Scratch scratch;
  float* wide = scratch.get<float>(p.rows * p.inputs);
  share_out(pool, p.rows, p.rows * p.inputs <= kParallelWork, [&](int64_t r) {
    for (int64_t i = r * p.inputs; i < (r + 1) * p.inputs; i++) wide[i] = widen(p.x16[i]);
  });
  p.x = wide;
  p.x16 = nullptr;
}

// Lays rows out and makes their tables, and then block after block of outputs. The weights that
// threads begin with are on their way meanwhile.
template <typename T, typename Each>
void in_blocks(const Problem& p, Rows<T>& rows, Tables& tables, ffi::ThreadPool& pool, const Each& each) {
  const Blocks blocks(p);
  const bool alone = p.rows * p.inputs * p.outputs <= kParallelWork;
  const int64_t count = p.rows + tables.rows();
  const auto prepare = [&](int64_t i) {
    for (int64_t t = 0; t < p.threads; t++) {
      const Block first = blocks[t];
      const Ahead ahead = p.weights_ahead(first.begin, std::min(first.begin + p.far(), first.end)).part(i, count);
      ahead.fetch(0, ahead.lines);
    }
    if (i < tables.rows())
      tables.fill(i);
    else
      rows.fill(i - tables.rows());
  };
  const auto block = [&](int64_t b) { each(blocks[b], blocks[b + p.threads]); };
  share_out_after(pool, count, prepare, blocks.count(), block, alone);
}

void few(Problem p, bool portable, ffi::ThreadPool& pool) {
  thread_local Scratch for_tables, for_rows;
  const Processor cpu = processor(portable);
  const bool bf16 = cpu.bf16 && p.x16 && p.w_bf16;
  if (!bf16) widen_rows(p, pool);
  Tables tables(p, cpu.avx512, for_tables, [](int32_t) { return true; });
#if defined(ZEN_AVX512)
  if (bf16) {
    Rows<uint16_t> rows(p, for_rows);
    return in_blocks(p, rows, tables, pool, [&](const Block& block, const Block& next) {
      avx512_block<uint16_t, true>(p, rows, tables, block, next);
    });
  }
#endif
  Rows<float> rows(p, for_rows);
  in_blocks(p, rows, tables, pool, [&](const Block& block, const Block& next) {
#if defined(ZEN_AVX512)
    if (cpu.avx512 && p.w_bf16) return avx512_block<float, true>(p, rows, tables, block, next);
    if (cpu.avx512) return avx512_block<float, false>(p, rows, tables, block, next);
    if (cpu.avx2) return avx2_block(p, rows, tables, block);
#endif
    plain_block(p, rows, tables, block);
  });
}

void many(Problem p, bool portable, ffi::ThreadPool& pool) {
  const Processor cpu = processor(portable);
  const std::vector<Party> all = parties(p);
  const ManyTasks tasks(p);
#if defined(ZEN_AVX512)
  if (cpu.bf16 && p.x16 && p.w_bf16) {
    thread_local Scratch for_tables, for_rows;
    Rounding rounding(p, all);
    share_out(pool, rounding.count(), false, [&](int64_t i) { rounding.judge(i); });
    Tables tables(p, true, for_tables, [&](int32_t slot) { return rounding.tables(slot); });
    const PromptTiles tiles(p, all, tables, for_rows);
    const auto fill = [&](int64_t i) { tiles.fill(i, tables); };
    const auto block = [&](int64_t i) { bf16_prompt(p, all, rounding, tiles, tables, tasks[i]); };
    return share_out_after(pool, tiles.count(), fill, tasks.count(), block, false);
  }
#endif
  widen_rows(p, pool);
  const bool alone = p.rows * p.inputs * p.outputs <= kParallelWork;
  share_out(pool, tasks.count(), alone, [&](int64_t i) {
#if defined(ZEN_AVX512)
    if (cpu.avx512 && p.w_bf16) return avx512_many<true>(p, all, tasks[i]);
    if (cpu.avx512) return avx512_many<false>(p, all, tasks[i]);
    if (cpu.avx2) return avx2_many(p, all, tasks[i]);
#endif
    plain_many(p, all, tasks[i]);
  });
}

// Sets x, w, y and their sizes.
void set(Problem& p, ffi::AnyBuffer x, ffi::AnyBuffer w, float* y, ffi::ThreadPool& pool) {
  const auto xd = x.dimensions(), wd = w.dimensions();
  p.rows = xd[0];
  p.inputs = xd[1];
  p.outputs = wd[0];
  p.w = w.untyped_data();
  p.w_bf16 = w.element_type() == ffi::BF16;
  p.y = y;
  p.threads = pool.num_threads();
  if (x.element_type() == ffi::BF16)
    p.x16 = static_cast<const uint16_t*>(x.untyped_data());
  else
    p.x = static_cast<const float*>(x.untyped_data());
}

void compute(const Problem& p, bool reconstruct, bool portable, ffi::ThreadPool& pool) {
  if (!p.rows || !p.outputs) return;
  if (!p.inputs) return std::fill_n(p.y, p.rows * p.outputs, 0.0f), void();
  if (reconstruct)
    many(p, portable, pool);
  else
    few(p, portable, pool);
}

ffi::Error base_impl(ffi::ThreadPool pool, bool reconstruct, bool portable, ffi::AnyBuffer x,
                     ffi::AnyBuffer w, ffi::ResultBuffer<ffi::F32> y) {
  Problem p{};
  set(p, x, w, y->typed_data(), pool);
  compute(p, reconstruct, portable, pool);
  return ffi::Error::Success();
}

ffi::Error delta_impl(ffi::ThreadPool pool, bool reconstruct, bool portable, ffi::AnyBuffer x,
                      ffi::AnyBuffer w, ffi::Buffer<ffi::U8> bits, ffi::Buffer<ffi::F32> scale,
                      ffi::Buffer<ffi::S32> slots, ffi::ResultBuffer<ffi::F32> y) {
  Problem p{};
  set(p, x, w, y->typed_data(), pool);
  const auto bd = bits.dimensions();
  p.variants = bd[0];
  p.levels = bd[1];
  p.bytes = bd[3];
  p.bits = bits.typed_data();
  p.scale = scale.typed_data();
  p.slots = slots.typed_data();
  compute(p, reconstruct, portable, pool);
  return ffi::Error::Success();
}

// y[r] = W[ids[r]] + sum over levels of alpha s; an id outside the weight is the nearest inside.
ffi::Error embed_impl(ffi::Buffer<ffi::S32> ids, ffi::AnyBuffer w, ffi::Buffer<ffi::U8> bits,
                      ffi::Buffer<ffi::F32> scale, ffi::Buffer<ffi::S32> slots,
                      ffi::ResultBuffer<ffi::F32> y) {
  Problem p{};
  const auto wd = w.dimensions(), bd = bits.dimensions();
  p.rows = ids.element_count();
  p.outputs = wd[0];
  p.inputs = wd[1];
  p.w = w.untyped_data();
  p.w_bf16 = w.element_type() == ffi::BF16;
  p.variants = bd[0];
  p.levels = bd[1];
  p.bytes = bd[3];
  p.bits = bits.typed_data();
  p.scale = scale.typed_data();
  p.slots = slots.typed_data();
  for (int64_t r = 0; r < p.rows; r++) {
    const int64_t id = std::clamp<int64_t>(ids.typed_data()[r], 0, p.outputs - 1);
    float* to = y->typed_data() + r * p.inputs;
    for (int64_t i = 0; i < p.inputs; i++) to[i] = effective(p, p.slot(r), id, i);
  }
  return ffi::Error::Success();
}

// Reads an array with all threads and does nothing else: what a product could reach at best.
ffi::Error read_impl(ffi::ThreadPool pool, ffi::AnyBuffer array, ffi::ResultBuffer<ffi::F32> y) {
  constexpr int64_t kWords = 1 << 17;
  const auto* words = static_cast<const uint64_t*>(array.untyped_data());
  const int64_t count = array.size_bytes() / 8, blocks = (count + kWords - 1) / kWords;
  std::atomic<uint64_t> all{0};
  share_out(pool, blocks, false, [&](int64_t b) {
    uint64_t sum = 0;
    for (int64_t i = b * kWords; i < std::min(count, (b + 1) * kWords); i++) sum ^= words[i];
    all ^= sum;
  });
  *y->typed_data() = static_cast<float>(all.load() & 1);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace zen

XLA_FFI_DEFINE_HANDLER_SYMBOL(ZenReadAll, zen::read_impl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::Buffer<ffi::F32>>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(ZenBaseMatmul, zen::base_impl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Attr<bool>("reconstruct")
                                  .Attr<bool>("portable")
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::Buffer<ffi::F32>>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(ZenBitdeltaMatmul, zen::delta_impl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Attr<bool>("reconstruct")
                                  .Attr<bool>("portable")
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::U8>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(ZenBitdeltaEmbed, zen::embed_impl,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::U8>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>());
