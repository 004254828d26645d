// Bindings of row selection: addresses and numbers in, nothing out; the caller has allocated the
// results.
#include "../cpu/select.hpp"

#include "../cpu/cutoff.hpp"
#include "../cpu/penalize.hpp"
#include "../cpu/pool.hpp"
#include "../cpu/rejection.hpp"
#include "bindings.hpp"

namespace py = pybind11;

namespace pipespec {
namespace {

using Address = std::uintptr_t;

template <class T = void>
T* pointer(Address address) {
  return reinterpret_cast<T*>(address);
}

void argmax(Address logits, int dtype, std::int64_t batch, std::int64_t width, std::int64_t vocab,
            std::int64_t batch_stride, std::int64_t width_stride, Address selected, int threads) {
  cpu::argmax({pointer(logits), cpu::DType(dtype), batch, width, vocab, batch_stride, width_stride},
              pointer<std::int32_t>(selected), threads);
}

void verify(Address logits, int dtype, std::int64_t batch, std::int64_t width, std::int64_t vocab,
            std::int64_t batch_stride, std::int64_t width_stride, Address tokens, int token_bytes,
            std::int64_t token_batch_stride, std::int64_t token_width_stride, Address query_lens,
            Address num_draft_tokens, Address selected, Address accepted, int threads) {
  cpu::verify({pointer(logits), cpu::DType(dtype), batch, width, vocab, batch_stride, width_stride},
              {pointer(tokens), token_bytes, token_batch_stride, token_width_stride},
              pointer<std::int32_t>(query_lens), pointer<std::int32_t>(num_draft_tokens),
              pointer<std::int32_t>(selected), pointer<std::int32_t>(accepted), threads);
}

void verify_coupled(Address logits, int dtype, std::int64_t batch, std::int64_t width,
                    std::int64_t vocab, std::int64_t batch_stride, std::int64_t width_stride,
                    Address tokens, int token_bytes, std::int64_t token_batch_stride,
                    std::int64_t token_width_stride, Address query_lens, Address num_draft_tokens,
                    Address selected, Address accepted, int threads, Address seeds,
                    Address positions, Address inv_temperature, Address cutoff,
                    std::uint32_t stream) {
  const cpu::Noise noise{pointer<std::uint64_t>(seeds), pointer<std::int64_t>(positions),
                         pointer<float>(inv_temperature), pointer<float>(cutoff), stream};
  cpu::verify({pointer(logits), cpu::DType(dtype), batch, width, vocab, batch_stride, width_stride},
              {pointer(tokens), token_bytes, token_batch_stride, token_width_stride},
              pointer<std::int32_t>(query_lens), pointer<std::int32_t>(num_draft_tokens),
              pointer<std::int32_t>(selected), pointer<std::int32_t>(accepted), threads, &noise);
}

void rejection_sample(Address logits, int dtype, std::int64_t batch, std::int64_t width,
                      std::int64_t vocab, std::int64_t batch_stride, std::int64_t width_stride,
                      Address tokens, int token_bytes, std::int64_t token_batch_stride,
                      std::int64_t token_width_stride, Address query_lens, Address num_draft_tokens,
                      Address selected, Address accepted, int threads, Address seeds,
                      Address positions, Address inv_temperature, Address cutoff,
                      std::uint32_t accept_stream, std::uint32_t residual_stream,
                      Address draft_logits, int draft_dtype, std::int64_t draft_batch_stride,
                      std::int64_t draft_width_stride, Address draft_inv_temperature,
                      Address draft_cutoff) {
  const cpu::Noise noise{pointer<std::uint64_t>(seeds), pointer<std::int64_t>(positions),
                         pointer<float>(inv_temperature), pointer<float>(cutoff), residual_stream};
  const cpu::Draft draft{{pointer(draft_logits), cpu::DType(draft_dtype), batch, width, vocab,
                          draft_batch_stride, draft_width_stride},
                         pointer<float>(draft_inv_temperature),
                         pointer<float>(draft_cutoff)};
  cpu::rejection_sample(
      {pointer(logits), cpu::DType(dtype), batch, width, vocab, batch_stride, width_stride},
      {pointer(tokens), token_bytes, token_batch_stride, token_width_stride},
      pointer<std::int32_t>(query_lens), pointer<std::int32_t>(num_draft_tokens),
      draft_logits == 0 ? nullptr : &draft, noise, accept_stream, pointer<std::int32_t>(selected),
      pointer<std::int32_t>(accepted), threads);
}

void sample(Address logits, int dtype, std::int64_t batch, std::int64_t width, std::int64_t vocab,
            std::int64_t batch_stride, std::int64_t width_stride, Address selected, int threads,
            Address seeds, Address positions, Address inv_temperature, Address cutoff,
            std::uint32_t stream) {
  cpu::sample({pointer(logits), cpu::DType(dtype), batch, width, vocab, batch_stride, width_stride},
              {pointer<std::uint64_t>(seeds), pointer<std::int64_t>(positions),
               pointer<float>(inv_temperature), pointer<float>(cutoff), stream},
              pointer<std::int32_t>(selected), threads);
}

void cutoff(Address logits, int dtype, std::int64_t batch, std::int64_t width, std::int64_t vocab,
            std::int64_t batch_stride, std::int64_t width_stride, Address inv_temperature,
            Address top_k, Address top_p, Address min_p, Address query_lens,
            Address num_draft_tokens, Address out, int threads) {
  cpu::cutoff({pointer(logits), cpu::DType(dtype), batch, width, vocab, batch_stride, width_stride},
              {pointer<float>(inv_temperature), pointer<std::int64_t>(top_k),
               pointer<double>(top_p), pointer<double>(min_p)},
              pointer<std::int32_t>(query_lens), pointer<std::int32_t>(num_draft_tokens),
              pointer<float>(out), threads);
}

void penalize(Address logits, std::int64_t batch, std::int64_t width, std::int64_t vocab,
              std::int64_t batch_stride, std::int64_t width_stride, Address tokens, int token_bytes,
              std::int64_t token_batch_stride, std::int64_t token_width_stride, Address history,
              std::int64_t capacity, Address lengths, Address repetition, Address presence,
              Address frequency, Address prompt_lengths, Address bias_ids, Address bias,
              std::int64_t num_biases, Address query_lens, Address num_draft_tokens,
              Address bitmask) {
  cpu::penalize({pointer<float>(logits),
                 batch,
                 width,
                 vocab,
                 batch_stride,
                 width_stride,
                 {pointer(tokens), token_bytes, token_batch_stride, token_width_stride},
                 pointer<std::int32_t>(history),
                 capacity,
                 pointer<std::int32_t>(lengths),
                 pointer<float>(repetition),
                 pointer<float>(presence),
                 pointer<float>(frequency),
                 pointer<std::int32_t>(prompt_lengths),
                 pointer<std::int32_t>(bias_ids),
                 pointer<float>(bias),
                 num_biases,
                 pointer<std::int32_t>(query_lens),
                 pointer<std::int32_t>(num_draft_tokens),
                 pointer<std::uint32_t>(bitmask)});
}

void gumbel(std::uint64_t seed, std::int64_t position, std::uint32_t stream, std::int64_t begin,
            std::int64_t count, Address out) {
  cpu::gumbel_noise(seed, position, stream, begin, count, pointer<float>(out));
}

}  // namespace

void bind_select(py::module_& m) {
  using WithoutGil = py::call_guard<py::gil_scoped_release>;
  m.attr("FLOAT32") = int(cpu::DType::kFloat32);
  m.attr("BFLOAT16") = int(cpu::DType::kBFloat16);
  m.attr("FLOAT16") = int(cpu::DType::kFloat16);
  m.def("argmax", &argmax, WithoutGil());
  m.def("verify", &verify, WithoutGil());
  m.def("verify_coupled", &verify_coupled, WithoutGil());
  m.def("rejection_sample", &rejection_sample, WithoutGil());
  m.def("sample", &sample, WithoutGil());
  m.def("cutoff", &cutoff, WithoutGil());
  m.def("penalize", &penalize, WithoutGil());
  m.def("gumbel", &gumbel, py::arg("seed"), py::arg("position"), py::arg("stream"),
        py::arg("begin"), py::arg("count"), py::arg("out"), WithoutGil());
  m.def("simd", &cpu::simd);
  m.def("set_simd", &cpu::set_simd, py::arg("name"));
  m.def("pool_threads", &cpu::pool_threads);
}

}  // namespace pipespec
