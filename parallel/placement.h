// The options of DataParallel, and what they mean for a module: where its replicas are and how large their parts.
#pragma once
#include <span>
#include <vector>

#include <tandem/nn/module.h>

namespace tandem::parallel {

/// Which devices take part, and where the outputs go.
struct DataParallelOptions {
  DeviceIds device_ids = {};    // default: all devices of the model's type
  DeviceId output_device = -1;  // default: the first of device_ids
  int dim = 0;                  // the dimension along which inputs are cut and outputs are joined
  // How many replicas there are; default: one a device. More are given to the devices in turn, and those of one device
  // run one after the other. A replica's part and random numbers do not depend on the number of devices.
  int replicas = 0;
  // One number a replica: the sizes of their parts are in this proportion, and are these where they sum to the number
  // of rows. Default: sizes that differ by at most one.
  std::vector<int64_t> part_sizes = {};
  // Every so many recorded forwards each replica's parameters are compared with the module's, where they are copies; 0:
  // never.
  int64_t check_every = 0;
  // S, a power of two that the number of devices divides: trains through `loss` alone, in S parts, with the same bits
  // on any number of devices, and on any number of ranks of a DistributedDataParallel with the same S. 0: off.
  int reproducible_shards = 0;
};

/// Sizes of at most `parts` parts of `rows` rows that differ by at most one, larger ones first. No part is empty, but
/// no rows make one part.
std::vector<int64_t> balanced_sizes(int64_t rows, std::size_t parts);

/// The options, resolved for a module.
struct Placement {
  std::vector<Device> devices = {};  // by replica
  Device output_device = {};
  int dim = 0;
  std::vector<int64_t> proportion = {};  // of the parts; empty: balanced
  int shards = 0;                        // reproducible_shards

  /// Throws Error for a device that does not exist or is listed twice, and for numbers that do not fit.
  Placement(const nn::Module& module, const DataParallelOptions& options);
  /// Sizes of the parts of a batch, for the first replicas or for all. Replicas with size 0 are left out, but for the
  /// first when there are no rows.
  std::vector<int64_t> sizes(int64_t rows) const;
};

}  // namespace tandem::parallel
