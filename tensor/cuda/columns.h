// Columns combined over rows: a team has a strip of columns side by side, so that rows are read in whole pieces. Many
// rows are cut into chunks, whose results are combined like rows; how depends on the sizes alone, and so do the bits.
#pragma once
#include <tandem/tensor/cuda/allocator.h>
#include <tandem/tensor/cuda/launch.h>

namespace tandem::cuda {

/// A number of matrices of one size.
struct Columns {
  std::int64_t matrices = 1, rows = 0, width = 0;
};

template <class Acc, class Combine, class Value, class Store>
struct CombineColumns {
  Columns of;
  std::int64_t chunks, chunk;  // number and rows of each
  Acc initial;
  Combine combine;
  Value value;   // (matrix, row, column)
  Store store;   // (matrix, column, result)
  Acc* partial;  // of the chunks, when there are several

  TANDEM_DEVICE void operator()(const Team& team, std::int64_t t) const {
    const std::int64_t strips = (of.width + kStrip - 1) / kStrip, part = t / strips, matrix = part / chunks;
    const std::int64_t row = part % chunks * chunk, column = t % strips * kStrip;
    const std::int64_t rows = of.rows - row < chunk ? of.rows - row : chunk;
    const std::int64_t columns = of.width - column < kStrip ? of.width - column : kStrip;
    team.reduce_columns(
        rows, static_cast<int>(columns), initial, combine,
        [&](std::int64_t i, int j) { return value(matrix, row + i, column + j); },
        [&](int j, Acc total) {
          if (partial != nullptr)
            partial[part * of.width + column + j] = total;
          else
            store(matrix, column + j, total);
        });
  }
};

template <class Acc>
struct LoadChunk {
  const Acc* from;
  std::int64_t chunks, width;
  TANDEM_DEVICE Acc operator()(std::int64_t matrix, std::int64_t chunk, std::int64_t column) const {
    return from[(matrix * chunks + chunk) * width + column];
  }
};

/// store(matrix, column, value(matrix, 0, column) combined with that of every other row), for all columns.
template <class Acc, class Combine, class Value, class Store>
void combine_columns(Device device, const Columns& of, Acc initial, Combine combine, Value value, Store store) {
  constexpr std::int64_t kRows = 128, kChunks = 512;
  const cudaStream_t stream = use(device);
  const std::int64_t strips = of.matrices * ((of.width + kStrip - 1) / kStrip);
  CombineColumns<Acc, Combine, Value, Store> all{of, 1, of.rows, initial, combine, value, store, nullptr};
  if (of.rows <= 2 * kRows || strips == 0) return for_each_team(stream, strips, all);
  const std::int64_t least = (of.rows + kChunks - 1) / kChunks;
  all.chunk = least < kRows ? kRows : least;
  all.chunks = (of.rows + all.chunk - 1) / all.chunk;
  const Scratch scratch(device, static_cast<std::size_t>(of.matrices * all.chunks * of.width) * sizeof(Acc));
  all.partial = static_cast<Acc*>(scratch.data());
  for_each_team(stream, strips * all.chunks, all);
  const Columns chunks{of.matrices, all.chunks, of.width};
  const LoadChunk<Acc> load{all.partial, all.chunks, of.width};
  const CombineColumns<Acc, Combine, LoadChunk<Acc>, Store> last{chunks,  1,    all.chunks, initial,
                                                                 combine, load, store,      nullptr};
  for_each_team(stream, strips, last);
}

}  // namespace tandem::cuda
