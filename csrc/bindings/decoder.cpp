// Bindings of the decoder's forward: addresses and numbers in, nothing out; the caller has
// allocated the results and checked everything but the token ids.
#include "../cpu/decoder.hpp"

#include <pybind11/stl.h>

#include <array>
#include <memory>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "../cpu/pages.hpp"
#include "bindings.hpp"

namespace py = pybind11;

namespace pipespec {
namespace {

// Address, dtype, and addresses of the scales and of the order, with the number of its rows;
// address 0: there are none. Of a matrix in blocks the dtype is kFirstFormat plus its format.
using WeightsAt = std::tuple<std::uintptr_t, int, std::uintptr_t, std::uintptr_t, std::int64_t>;
constexpr int kFirstFormat = 16;

cpu::Weights weights(const WeightsAt& at) {
  const auto& [data, dtype, scale, order, stored] = at;
  cpu::Weights found{reinterpret_cast<const void*>(data),          cpu::DType::kFloat32,
                     reinterpret_cast<const float*>(scale),        {},
                     reinterpret_cast<const std::int64_t*>(order), stored};
  if (dtype >= kFirstFormat)
    found.format = cpu::Format(dtype - kFirstFormat);
  else
    found.dtype = cpu::DType(dtype);
  return found;
}

// In the order of the fields of pipespec_kernels.decoder.LayerWeights, without the scales.
using LayerAt = std::array<WeightsAt, 31>;

cpu::LayerWeights layer(const LayerAt& at) {
  cpu::LayerWeights w;
  cpu::Weights* const fields[] = {&w.input_norm,
                                  &w.q,
                                  &w.k,
                                  &w.v,
                                  &w.o,
                                  &w.post_norm,
                                  &w.gate,
                                  &w.up,
                                  &w.down,
                                  &w.q_bias,
                                  &w.k_bias,
                                  &w.v_bias,
                                  &w.o_bias,
                                  &w.gate_bias,
                                  &w.up_bias,
                                  &w.down_bias,
                                  &w.q_norm,
                                  &w.k_norm,
                                  &w.side_norm,
                                  &w.o_norm,
                                  &w.down_norm,
                                  &w.input_norm_bias,
                                  &w.post_norm_bias,
                                  &w.sinks,
                                  &w.q_gate,
                                  &w.q_gate_bias,
                                  &w.v_norm,
                                  &w.per_layer_gate,
                                  &w.per_layer_out,
                                  &w.per_layer_norm,
                                  &w.output_scale};
  for (std::size_t i = 0; i < at.size(); ++i) *fields[i] = weights(at[i]);
  return w;
}

// In the order of cpu::DecoderShape.
cpu::DecoderShape shape(const std::array<std::int64_t, 9>& sizes, const std::array<int, 5>& kinds,
                        const std::array<float, 11>& numbers) {
  const auto [hidden, intermediate, heads, kv_heads, head_dim, vocabulary, rotary_dim, latent,
              per_layer] = sizes;
  const auto [activation, norm, rotates_pairs, norms_rotated, is_parallel] = kinds;
  const auto [eps, scale, norm_offset, softcap, residual, embedding, logit, logit_softcap,
              per_layer_scale, per_layer_in_scale, per_layer_sum_scale] = numbers;
  return {hidden,
          intermediate,
          heads,
          kv_heads,
          head_dim,
          vocabulary,
          rotary_dim,
          eps,
          scale,
          cpu::Activation(activation),
          norm_offset,
          cpu::NormKind(norm),
          rotates_pairs != 0,
          norms_rotated != 0,
          is_parallel != 0,
          softcap,
          residual,
          embedding,
          logit,
          logit_softcap,
          latent,
          per_layer,
          per_layer_scale,
          per_layer_in_scale,
          per_layer_sum_scale};
}

// In the order of pipespec_kernels.experts: weights; sizes; the factor of the weights, jitter,
// limit.
using ExpertsAt =
    std::tuple<std::array<WeightsAt, 13>, std::array<std::int64_t, 11>, std::array<float, 3>>;

cpu::ExpertWeights experts(const ExpertsAt& at) {
  const auto& [tensors, sizes, numbers] = at;
  cpu::ExpertWeights w;
  cpu::Weights* const fields[] = {&w.router,       &w.router_bias, &w.choice_bias, &w.gate,
                                  &w.up,           &w.down,        &w.gate_bias,   &w.up_bias,
                                  &w.down_bias,    &w.shared_gate, &w.shared_up,   &w.shared_down,
                                  &w.shared_router};
  for (std::size_t i = 0; i < tensors.size(); ++i) *fields[i] = weights(tensors[i]);
  const auto [count, chosen, scores, normalised, groups, chosen_groups, group_best, size, shared,
              stride, up_first] = sizes;
  const auto [factor, jitter, limit] = numbers;
  w.routing = {count,           chosen, cpu::Scores(scores),
               normalised != 0, groups, chosen_groups,
               group_best,      factor, jitter};
  w.intermediate = size, w.shared_intermediate = shared;
  w.stride = stride, w.up_first = up_first;
  w.limit = limit;
  return w;
}

// In the order of pipespec_kernels.recurrent: weights; heads and sizes, channels, taps, order of
// the outputs.
using RecurrentAt = std::tuple<std::array<WeightsAt, 12>, std::array<std::int64_t, 7>>;

cpu::RecurrentWeights recurrent(const RecurrentAt& at) {
  const auto& [tensors, sizes] = at;
  cpu::RecurrentWeights w;
  cpu::Weights* const fields[] = {&w.in,          &w.gates,     &w.beta,       &w.decay,
                                  &w.out,         &w.in_bias,   &w.out_bias,   &w.kernel,
                                  &w.kernel_bias, &w.decay_log, &w.decay_bias, &w.norm};
  for (std::size_t i = 0; i < tensors.size(); ++i) *fields[i] = weights(tensors[i]);
  w.delta = {sizes[0], sizes[1], sizes[2], sizes[3], sizes[6] != 0};
  w.channels = sizes[4], w.taps = sizes[5];
  return w;
}

// In the order of pipespec_kernels.latent: weights; sizes; the epsilon of the norms.
using LatentAt = std::tuple<std::array<WeightsAt, 9>, std::array<std::int64_t, 3>, float>;

cpu::LatentWeights latent(const LatentAt& at) {
  const auto& [tensors, sizes, eps] = at;
  cpu::LatentWeights w;
  cpu::Weights* const fields[] = {&w.query_latents, &w.queries,      &w.latents,
                                  &w.keys,          &w.values,       &w.norm,
                                  &w.query_norm,    &w.latents_bias, &w.query_latents_bias};
  for (std::size_t i = 0; i < tensors.size(); ++i) *fields[i] = weights(tensors[i]);
  w.plain = sizes[0], w.value_dim = sizes[1], w.query_rank = sizes[2];
  w.eps = eps;
  return w;
}

// Of a layer: window, adds_to_norm, rope, head_norms, the layer whose keys it reads, sizes,
// experts, what is recurrent, latents.
using LayerKind =
    std::tuple<std::int64_t, bool, std::int64_t, int, std::int64_t, std::array<std::int64_t, 4>,
               std::optional<ExpertsAt>, std::optional<RecurrentAt>, std::optional<LatentAt>>;

std::unique_ptr<cpu::Decoder> make(const std::array<std::int64_t, 9>& sizes,
                                   const std::array<int, 5>& kinds,
                                   const std::array<float, 11>& numbers,
                                   const std::vector<LayerAt>& layers,
                                   const std::vector<LayerKind>& rest,
                                   const std::array<WeightsAt, 8>& ends,
                                   std::int64_t per_layer_width, std::int64_t room, int threads) {
  std::vector<cpu::LayerWeights> all;
  for (std::size_t i = 0; i < layers.size(); ++i) {
    all.push_back(layer(layers[i]));
    cpu::LayerWeights& w = all.back();
    int head_norms = 0;
    std::optional<ExpertsAt> of_experts;
    std::optional<RecurrentAt> of_recurrent;
    std::optional<LatentAt> of_latent;
    std::array<std::int64_t, 4> own{};
    std::tie(w.window, w.adds_to_norm, w.rope, head_norms, w.keys_of, own, of_experts, of_recurrent,
             of_latent) = rest.at(i);
    w.sizes = {own[0], own[1], own[2], own[3]};
    if (of_experts) w.experts = experts(*of_experts);
    if (of_recurrent) w.recurrent = recurrent(*of_recurrent);
    if (of_latent) w.latent = latent(*of_latent);
    w.head_norms = cpu::HeadNorms(head_norms);
  }
  py::gil_scoped_release without_gil;
  return std::make_unique<cpu::Decoder>(
      shape(sizes, kinds, numbers), all,
      cpu::EndWeights{weights(ends[0]), weights(ends[1]), weights(ends[2]), weights(ends[3]),
                      weights(ends[4]), weights(ends[5]), weights(ends[6]), weights(ends[7]),
                      per_layer_width},
      room, threads);
}

// Keys, values, dtype; strides of the keys, then of the values.
using StoreAt = std::tuple<std::uintptr_t, std::uintptr_t, int, std::array<std::int64_t, 8>>;
using StoresAt = std::vector<StoreAt>;

cpu::Stores stores(const StoresAt& at) {
  cpu::Stores found;
  for (const auto& [keys, values, dtype, strides] : at)
    found.push_back({reinterpret_cast<void*>(keys),
                     reinterpret_cast<void*>(values),
                     cpu::DType(dtype),
                     {strides[0], strides[1], strides[2], strides[3]},
                     {strides[4], strides[5], strides[6], strides[7]}});
  return found;
}

// Tokens, bytes of one, strides.
using TokensAt = std::tuple<std::uintptr_t, int, std::int64_t, std::int64_t>;

cpu::Tokens tokens(const TokensAt& at) {
  const auto& [data, item_bytes, row_stride, column_stride] = at;
  return {reinterpret_cast<const void*>(data), item_bytes, row_stride, column_stride};
}

// Lengths, columns, cos, sin, positions of these, and factors of queries.
using ColumnsAt = std::tuple<std::vector<std::int64_t>, std::int64_t, std::uintptr_t,
                             std::uintptr_t, std::int64_t, std::uintptr_t>;

cpu::Columns columns(const ColumnsAt& at) {
  const auto& [lengths, count, cos, sin, positions, factors] = at;
  return {std::int64_t(lengths.size()),
          count,
          lengths.data(),
          reinterpret_cast<const float*>(cos),
          reinterpret_cast<const float*>(sin),
          positions,
          reinterpret_cast<const float*>(factors)};
}

// Inputs, dtype, states, slots, rows, places.
using StatesAt = std::optional<std::tuple<std::uintptr_t, int, std::uintptr_t, std::int64_t,
                                          std::int64_t, std::vector<std::int64_t>>>;

std::optional<cpu::States> states(const StatesAt& at) {
  if (!at) return {};
  const auto& [inputs, dtype, found, slots, rows, places] = *at;
  return cpu::States{reinterpret_cast<void*>(inputs),
                     cpu::DType(dtype),
                     reinterpret_cast<float*>(found),
                     slots,
                     rows,
                     places.data()};
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
  m.def(
      "use_huge_pages",
      [](const std::vector<std::pair<std::uintptr_t, std::uintptr_t>>& memory, std::int64_t room,
         int threads) {
        std::vector<cpu::AddressRange> ranges;
        for (const auto& [address, bytes] : memory) ranges.push_back({address, address + bytes});
        return cpu::use_huge_pages(std::move(ranges), room, threads);
      },
      py::arg("memory"), py::arg("room"), py::arg("threads"), WithoutGil());
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
          [](const Decoder& d, std::uintptr_t hidden, std::uintptr_t side,
             const std::optional<TokensAt>& ids, const StoresAt& at, const ColumnsAt& fed,
             std::int64_t begin, std::int64_t end, const TapsAt& tapped, int threads,
             const StatesAt& held) {
            const std::optional<cpu::States> of_rows = states(held);
            const cpu::Tokens read = ids ? tokens(*ids) : cpu::Tokens{};
            d.run_layers(reinterpret_cast<float*>(hidden), reinterpret_cast<const float*>(side),
                         ids ? &read : nullptr, stores(at), columns(fed), begin, end, threads,
                         taps(tapped), of_rows ? &*of_rows : nullptr);
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
          [](const Decoder& d, const TokensAt& ids, const StoresAt& at, const ColumnsAt& fed,
             std::int64_t keep, std::uintptr_t out, int dtype, const TapsAt& tapped, int threads,
             const StatesAt& held) {
            const std::optional<cpu::States> of_rows = states(held);
            d.step(tokens(ids), stores(at), columns(fed), keep, reinterpret_cast<void*>(out),
                   cpu::DType(dtype), threads, taps(tapped), of_rows ? &*of_rows : nullptr);
          },
          WithoutGil());
}

}  // namespace pipespec
