#include "product.hpp"

#include "kernels.hpp"

namespace pipespec::cpu {
namespace {

constexpr int64_t kPanel = kPanelOutputs;
// Maximum panels of one unit of work: what they compute for a tile stays in the second-level cache.
constexpr int64_t kMaxUnitPanels = 8;
// Panels by which units differ in size: whole pairs of gates and ups.
constexpr int64_t kUnitStep = 4;
// Inputs of a tile of rows: they are read once per group, from the second-level cache.
constexpr int64_t kTileBytes = 192 << 10;
constexpr int64_t kMaxTileRows = 48;  // whole blocks of rows

int64_t whole(int64_t n, int64_t of) { return (n + of - 1) / of; }
int64_t rounded(int64_t n, int64_t to) { return whole(n, to) * to; }

}  // namespace

Pieces::Pieces(const Matrix& matrix, int64_t rows, int64_t wanted) {
  const int64_t fitting =
      matrix.reads_rounded()
          ? RoundedInputs::tile_columns(rows)
          : std::clamp<int64_t>(kTileBytes / (matrix.inputs * 4) / 6 * 6, 6, kMaxTileRows);
  tile_rows = std::min(fitting, rows);
  tiles = whole(rows, tile_rows);
  chunk_panels =
      std::min(rounded(whole(matrix.panels() * tiles, wanted), kUnitStep), kMaxUnitPanels);
  chunks = whole(matrix.panels(), chunk_panels);
}

void multiply(const Matrix& m, int64_t panel, int64_t panels, const Tile& tile, int threads,
              float* to, int64_t stride) {
  const DecoderKernels& kernels = cpu::kernels().decoder;
  auto run = std::upper_bound(m.runs.begin(), m.runs.end(), panel,
                              [](int64_t p, const Run& r) { return p < r.first; });
  for (--run; run != m.runs.end() && run->first < panel + panels; ++run) {
    const int64_t first = std::max(panel, run->first);
    const int64_t count = std::min(panel + panels, run->first + run->panels) - first;
    float* const out_at = to + (first - panel) * kPanel;
    if (run->format) {
      packed_kernels().products[int(*run->format)](
          run->data + (first - run->first) * run->panel_bytes, m.inputs, count,
          tile.rounded[traits(*run->format).rounds256].tile(tile.begin), tile.count, out_at,
          stride);
      continue;
    }
    const RowProduct product = run->bits == 8    ? kernels.product8
                               : run->bits == 16 ? kernels.product16
                                                 : kernels.product32;
    const int64_t at = first - run->first;
    const int64_t after = std::min(at + count + (threads - 1) * panels, run->panels - 1);
    product(&run->rows[size_t(at)], count, run->rows[size_t(after)], m.inputs, tile.rows,
            tile.stride, tile.count, out_at, stride);
  }
  const auto each = [&](const std::vector<float>& of, auto&& apply) {
    if (of.empty()) return;
    const float* const values = of.data() + panel * kPanel;
    for (int64_t r = 0; r < tile.count; ++r)
      for (int64_t i = 0; i < panels * kPanel; ++i) apply(to[r * stride + i], values[i]);
  };
  each(m.scale, [](float& x, float scale) { x *= scale; });
  each(m.bias, [](float& x, float bias) { x += bias; });
}

}  // namespace pipespec::cpu
