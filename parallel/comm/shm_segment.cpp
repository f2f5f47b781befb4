#include <tandem/parallel/comm/shm_segment.h>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <new>

#include <tandem/tensor/error.h>

namespace tandem::parallel {

int create_shm_segment(int world_size) {
  check(world_size >= 1 && world_size <= kMaxShmRanks, "shm", "{} ranks were asked for; give 1 to {}", world_size,
        kMaxShmRanks);
  const int fd = memfd_create("tandem", 0);  // inherited across exec on purpose
  check(fd >= 0, "shm", "shared memory cannot be made: {}", std::strerror(errno));
  // Reserved now: touching a page that cannot be had later would kill the process.
  const int error = posix_fallocate(fd, 0, static_cast<off_t>(shm_bytes(world_size)));
  if (error != 0) close(fd);
  check(error == 0, "shm", "{} bytes of shared memory for {} ranks cannot be had: {}", shm_bytes(world_size),
        world_size, std::strerror(error));
  auto* header = static_cast<ShmHeader*>(mmap(nullptr, sizeof(ShmHeader), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0));
  check(header != MAP_FAILED, "shm", "the segment cannot be mapped: {}", std::strerror(errno));
  new (header) ShmHeader();
  header->world_size = static_cast<std::uint32_t>(world_size);
  munmap(header, sizeof(ShmHeader));
  return fd;
}

ShmHeader* map_shm_segment(int fd, int world_size) {
  struct stat info {};
  check(fstat(fd, &info) == 0 && static_cast<std::size_t>(info.st_size) == shm_bytes(world_size), "shm",
        "file descriptor {} ({}) is not this job's shared memory; start the program with tandem-run", fd, kShmVariable);
  void* memory = mmap(nullptr, shm_bytes(world_size), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  check(memory != MAP_FAILED, "shm", "the segment cannot be mapped: {}", std::strerror(errno));
  return static_cast<ShmHeader*>(memory);
}

}  // namespace tandem::parallel
