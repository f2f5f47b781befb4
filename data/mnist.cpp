// Where the data sets lie, and the conversion of a batch.
#include <tandem/data/mnist.h>

#include <unistd.h>

#include <tandem/data/idx.h>
#include <tandem/tensor/compiler.h>
#include <tandem/tensor/create.h>

namespace tandem::data {
namespace {

TANDEM_CLONES void pixels_to_floats(const std::uint8_t* from, float* to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) to[i] = static_cast<float>(from[i]) / 255.0f;
}

std::string find_file(std::string_view name, const std::string& root, const MNISTOptions& options, const char* kind,
                      std::string_view remedy) {
  const std::string file = fmt::format("{}/{}-{}-ubyte", root, options.train ? "train" : "t10k", kind);
  for (const char* suffix : {"", ".gz"})
    if (access((file + suffix).c_str(), F_OK) == 0) return file + suffix;
  fail(name, "neither {} nor {}.gz exists; {}give the folder of its four files by .root (a program's --data)", file,
       file, remedy);
}

IdxDataset find(std::string_view name, const MNISTOptions& options, const char* default_root, std::string_view remedy) {
  const std::string root = options.root.empty() ? default_root : options.root;
  return {find_file(name, root, options, "images-idx3", remedy), find_file(name, root, options, "labels-idx1", remedy)};
}

}  // namespace

IdxDataset::IdxDataset(const std::string& images_path, const std::string& labels_path)
    : images_(read_idx(images_path)), labels_(read_idx(labels_path)) {
  check(images_.dim() == 3, "IdxDataset", "{} holds {}; expected images {{n, height, width}}", images_path,
        images_.shape());
  check(labels_.dim() == 1, "IdxDataset", "{} holds {}; expected labels {{n}}", labels_path, labels_.shape());
  check(images_.size(0) == labels_.size(0), "IdxDataset",
        "{} holds {} images and {} {} labels; give two files of one set", images_path, images_.size(0), labels_path,
        labels_.size(0));
}

std::array<Tensor, 2> IdxDataset::get_batch(std::span<const int64_t> rows) const {
  for (const int64_t row : rows) detail::check_row("IdxDataset", row, size());
  const int64_t count = static_cast<int64_t>(rows.size()), height = images_.size(1), width = images_.size(2);
  const int64_t pixels = height * width;
  Tensor x = empty({count, 1, height, width});
  Tensor y = empty({count}, {.dtype = int64});
  const std::uint8_t *images = images_.const_data<std::uint8_t>(), *labels = labels_.const_data<std::uint8_t>();
  float* to = x.data<float>();
  int64_t* label = y.data<int64_t>();
  for (const int64_t row : rows) {
    pixels_to_floats(images + row * pixels, to, pixels);
    to += pixels;
    *label++ = labels[row];
  }
  return {x, y};
}

std::array<Tensor, 2> IdxDataset::get(int64_t i) const {
  const auto [x, y] = get_batch(std::span(&i, 1));
  return {x.select(0, 0), y.select(0, 0)};
}

FashionMNIST::FashionMNIST(const FashionMNISTOptions& options)
    : IdxDataset(find("FashionMNIST", options, "/usr/share/datasets/fashion-mnist",
                      "install Debian's package dataset-fashion-mnist, or ")) {}

MNIST::MNIST(const MNISTOptions& options) : IdxDataset(find("MNIST", options, "/usr/share/datasets/mnist", "")) {}

}  // namespace tandem::data
