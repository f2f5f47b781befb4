"""Files go from Python's safetensors package to Tandem and back unchanged. Argument: the program io_test."""
import json
import os
import struct
import subprocess
import sys
import tempfile

try:
    import numpy as np
    import safetensors
    import safetensors.numpy
except ImportError as missing:
    print(f"skipped: {missing}; pip install safetensors numpy")
    sys.exit(77)

numbers = np.random.default_rng(0)
arrays = {
    "linear_relu_stack.0.weight": numbers.standard_normal((5, 3), dtype=np.float32),
    "double": numbers.standard_normal((2, 1, 2)),
    "int64": np.array([-(2**53) - 1, 2**63 - 1]),
    "int32": np.array([[-1], [7]], dtype=np.int32),
    "uint8": np.arange(256, dtype=np.uint8),
    "bool": np.array([True, False, True]),
    "half": np.array([0.1, -65504, np.inf], dtype=np.float16),
    "empty": np.zeros((3, 0), dtype=np.float32),
    "scalar": np.array(2.5, dtype=np.float32),
    'name "\\ \n ä': np.ones(1, dtype=np.float32),
}
metadata = {"format": "pt", "note": "€"}

with tempfile.TemporaryDirectory() as directory:
    source, target = os.path.join(directory, "python"), os.path.join(directory, "tandem")

    def copy_by_tandem():
        environment = dict(os.environ, TANDEM_TEST_FROM=source, TANDEM_TEST_TO=target)
        subprocess.run([sys.argv[1], "-tc=child: copy a file for Python", "-ns"], env=environment, check=True,
                       stdout=subprocess.DEVNULL, timeout=60)

    safetensors.numpy.save_file(arrays, source, metadata)
    copy_by_tandem()
    back = safetensors.numpy.load_file(target)
    assert sorted(back) == sorted(arrays), sorted(back)
    for name, array in arrays.items():
        assert back[name].dtype == array.dtype and back[name].shape == array.shape, name
        assert back[name].tobytes() == array.tobytes(), name
    with safetensors.safe_open(target, "numpy") as file:
        assert file.metadata() == metadata, file.metadata()

    # numpy has no bfloat16, so the file is written by hand and its bytes are compared.
    header = json.dumps({"b": {"dtype": "BF16", "shape": [2, 2], "data_offsets": [0, 8]}}).encode()
    with open(source, "wb") as file:
        file.write(struct.pack("<Q", len(header)) + header + bytes(range(8)))
    copy_by_tandem()
    with open(target, "rb") as file:
        ((name, tensor),) = safetensors.deserialize(file.read())
    assert (name, tensor["dtype"], tensor["shape"]) == ("b", "BF16", [2, 2]), tensor
    assert bytes(tensor["data"]) == bytes(range(8))
print("tensors of all types went to Tandem and back unchanged")
