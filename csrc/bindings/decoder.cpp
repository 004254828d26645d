// Bindings of the decoder's forward: addresses and numbers in, nothing out; the caller has
// allocated the results and checked everything but the token ids.
#include "../cpu/decoder.hpp"

#include <pybind11/stl.h>

#include <array>
#include <memory>
#include <tuple>
#include <vector>

#include "bindings.hpp"

namespace py = pybind11;

namespace pipespec {
namespace {

// Address, dtype, and address of the scales; address 0: there are none. Of a matrix in blocks the
// dtype is kFirstFormat plus its format.
using WeightsAt = std::tuple<std::uintptr_t, int, std::uintptr_t>;
constexpr int kFirstFormat = 16;

cpu::Weights weights(const WeightsAt& at) {
  const auto& [data, dtype, scale] = at;
  cpu::Weights found{reinterpret_cast<const void*>(data),
                     cpu::DType::kFloat32,
                     reinterpret_cast<const float*>(scale),
                     {}};
  if (dtype >= kFirstFormat)
    found.format = cpu::Format(dtype - kFirstFormat);
  else
    found.dtype = cpu::DType(dtype);
  return found;
}

// In the order of the fields of pipespec_kernels.decoder.LayerWeights, without the scales.
cpu::LayerWeights layer(const std::array<WeightsAt, 19>& at) {
  cpu::LayerWeights w;
  cpu::Weights* const fields[] = {&w.input_norm, &w.q,      &w.k,      &w.v,         &w.o,
                                  &w.post_norm,  &w.gate,   &w.up,     &w.down,      &w.q_bias,
                                  &w.k_bias,     &w.v_bias, &w.o_bias, &w.gate_bias, &w.up_bias,
                                  &w.down_bias,  &w.q_norm, &w.k_norm, &w.side_norm};
  for (std::size_t i = 0; i < at.size(); ++i) *fields[i] = weights(at[i]);
  return w;
}

std::unique_ptr<cpu::Decoder> make(const std::array<std::int64_t, 7>& sizes, float eps, float scale,
                                   int activation, float norm_offset,
                                   const std::vector<std::array<WeightsAt, 19>>& layers,
                                   const std::vector<std::pair<std::int64_t, bool>>& rest,
                                   const std::array<WeightsAt, 4>& ends, std::int64_t room,
                                   int threads) {
  const auto [hidden, intermediate, heads, kv_heads, head_dim, vocabulary, rotary_dim] = sizes;
  std::vector<cpu::LayerWeights> all;
  for (std::size_t i = 0; i < layers.size(); ++i) {
    all.push_back(layer(layers[i]));
    std::tie(all.back().window, all.back().adds_to_norm) = rest.at(i);
  }
  py::gil_scoped_release without_gil;
  return std::make_unique<cpu::Decoder>(
      cpu::DecoderShape{hidden, intermediate, heads, kv_heads, head_dim, vocabulary, rotary_dim,
                        eps, scale, cpu::Activation(activation), norm_offset},
      all, cpu::EndWeights{weights(ends[0]), weights(ends[1]), weights(ends[2]), weights(ends[3])},
      room, threads);
}

// Keys, values, dtype; strides of the keys, then of the values.
using CacheAt = std::tuple<std::uintptr_t, std::uintptr_t, int, std::array<std::int64_t, 8>>;

cpu::KeysValues cache(const CacheAt& at) {
  const auto& [keys, values, dtype, strides] = at;
  return {reinterpret_cast<void*>(keys),
          reinterpret_cast<void*>(values),
          cpu::DType(dtype),
          {strides[0], strides[1], strides[2], strides[3]},
          {strides[4], strides[5], strides[6], strides[7]}};
}

// Tokens, bytes of one, strides.
using TokensAt = std::tuple<std::uintptr_t, int, std::int64_t, std::int64_t>;

cpu::Tokens tokens(const TokensAt& at) {
  const auto& [data, item_bytes, row_stride, column_stride] = at;
  return {reinterpret_cast<const void*>(data), item_bytes, row_stride, column_stride};
}

// Lengths, columns, cos, sin.
using ColumnsAt =
    std::tuple<std::vector<std::int64_t>, std::int64_t, std::uintptr_t, std::uintptr_t>;

cpu::Columns columns(const ColumnsAt& at) {
  const auto& [lengths, count, cos, sin] = at;
  return {std::int64_t(lengths.size()), count, lengths.data(), reinterpret_cast<const float*>(cos),
          reinterpret_cast<const float*>(sin)};
}

// Layers, out, dtype, begin of each row, stride.
using TapsAt = std::tuple<std::vector<std::int64_t>, std::uintptr_t, int, std::vector<std::int64_t>,
                          std::int64_t>;

cpu::Taps taps(const TapsAt& at) {
  const auto& [layers, out, dtype, begin, stride] = at;
  return {layers, reinterpret_cast<void*>(out), cpu::DType(dtype), begin.data(), stride};
}

}  // namespace

void bind_decoder(py::module_& m) {
  using WithoutGil = py::call_guard<py::gil_scoped_release>;
  using cpu::Decoder;
  m.attr("FIRST_FORMAT") = kFirstFormat;
  py::class_<Decoder>(m, "Decoder")
      .def(py::init(&make))
      .def_property_readonly("bytes", &Decoder::bytes)
      .def_property_readonly("weight_bits", &Decoder::weight_bits)
      .def(
          "embed",
          [](const Decoder& d, const TokensAt& ids, std::int64_t rows, std::int64_t columns,
             std::uintptr_t hidden) {
            d.embed(tokens(ids), rows, columns, reinterpret_cast<float*>(hidden));
          },
          WithoutGil())
      .def(
          "run_layers",
          [](const Decoder& d, std::uintptr_t hidden, std::uintptr_t side, const CacheAt& at,
             const ColumnsAt& fed, std::int64_t begin, std::int64_t end, const TapsAt& tapped,
             int threads) {
            d.run_layers(reinterpret_cast<float*>(hidden), reinterpret_cast<const float*>(side),
                         cache(at), columns(fed), begin, end, threads, taps(tapped));
          },
          WithoutGil())
      .def(
          "logits",
          [](const Decoder& d, std::uintptr_t hidden, std::int64_t count, std::uintptr_t out,
             int dtype, int threads) {
            d.logits(reinterpret_cast<const float*>(hidden), count, reinterpret_cast<void*>(out),
                     cpu::DType(dtype), threads);
          },
          WithoutGil())
      .def(
          "step",
          [](const Decoder& d, const TokensAt& ids, const CacheAt& at, const ColumnsAt& fed,
             std::int64_t keep, std::uintptr_t out, int dtype, const TapsAt& tapped, int threads) {
            d.step(tokens(ids), cache(at), columns(fed), keep, reinterpret_cast<void*>(out),
                   cpu::DType(dtype), threads, taps(tapped));
          },
          WithoutGil());
}

}  // namespace pipespec
