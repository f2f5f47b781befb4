// Labelled images in IDX files: Fashion-MNIST, MNIST, and others in the same format.
#pragma once
#include <string>

#include <tandem/data/dataset.h>

namespace tandem::data {

/// Images {n, height, width} and labels {n} of two IDX files, kept as bytes and shared by copies of the object.
/// An example is float32 {1, height, width}, pixel / 255, and its label, int64 {}.
class IdxDataset : public Dataset<2> {
 public:
  /// Throws Error when a file cannot be read (see read_idx), has other dimensions, or when the numbers of images and
  /// labels differ.
  IdxDataset(const std::string& images_path, const std::string& labels_path);
  int64_t size() const override { return images_.size(0); }
  std::array<Tensor, 2> get(int64_t i) const override;
  /// float32 {rows, 1, height, width} in [0, 1] and int64 {rows}. Throws Error for a row out of range.
  std::array<Tensor, 2> get_batch(std::span<const int64_t> rows) const override;
  /// All images as they are stored: uint8 {n, height, width}.
  const Tensor& images() const { return images_; }
  /// All labels as they are stored: uint8 {n}.
  const Tensor& labels() const { return labels_; }

 private:
  Tensor images_, labels_;
};

/// Where the files are, and which of the two sets is read.
struct MNISTOptions {
  std::string root = {};  // folder of the four files, with or without .gz; empty: the default one
  bool train = true;      // the 60,000 training images, or the 10,000 test images
};
using FashionMNISTOptions = MNISTOptions;

/// 28 x 28 grey images of clothing in 10 classes. `root` is by default /usr/share/datasets/fashion-mnist, where
/// Debian's package dataset-fashion-mnist installs. Throws Error when the files are missing, naming the package.
class FashionMNIST : public IdxDataset {
 public:
  explicit FashionMNIST(const FashionMNISTOptions& options = {});
};

/// 28 x 28 grey images of digits. `root` is by default /usr/share/datasets/mnist. Throws Error when the files are
/// missing.
class MNIST : public IdxDataset {
 public:
  explicit MNIST(const MNISTOptions& options = {});
};

}  // namespace tandem::data
