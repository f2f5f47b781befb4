// The file by which the ranks that mpirun or srun has started on one host find rank 0's store, and its secret.
#pragma once
#include <string>

namespace tandem::parallel {

/// Where rank 0's store is, and the secret that it asks for.
struct Meeting {
  int port = 0;  // on 127.0.0.1
  std::string secret = {};
};

/// Rank 0's side: the file is there for as long as this object. It lies in XDG_RUNTIME_DIR where that is a folder of
/// this user alone, else in tandem-UID in TMPDIR or /tmp, and only its owner may read it. A file of a job that has
/// been killed says so by its writer, which is gone: it is replaced here and passed over by those that read.
class MeetingFile {
 public:
  /// Error when the folder or the file is somebody else's, or belongs to another program of the job.
  MeetingFile(const std::string& job_id, const Meeting& meeting);
  ~MeetingFile();
  MeetingFile(const MeetingFile&) = delete;
  MeetingFile& operator=(const MeetingFile&) = delete;

 private:
  std::string path_;
};

/// The other ranks' side: waits for the file. CommError about rank 0 when it does not come within `seconds`.
Meeting read_meeting(const std::string& job_id, int rank, int world_size, double seconds);

}  // namespace tandem::parallel
