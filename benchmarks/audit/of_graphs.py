"""The graphs that are served, of every method's recipe for digits, by another runtime than
onnxruntime."""

import numpy as np
import torch

from benchmarks.audit.check import Pairs, check
from benchmarks.model import ROOT
from model_store.inference.noise import noise
from training import recipe as recipes
from training.data import load, split, split_sizes
from training.export.graphs import export, runtime_of
from training.export.served import fitted_detectors, fold
from training.networks.model import build, initialise

ROWS, DRAWS = 17, 9


@check(
    "both graphs of each recipe for digits, not trained",
    "openvino",
    "Core().compile_model(model, 'CPU'), float32",
    1e-4,
    most_seeds=1,
)
def graphs(generator: np.random.Generator) -> Pairs:
    import openvino

    core = openvino.Core()
    exact = {"INFERENCE_PRECISION_HINT": "f32"}
    for path in sorted((ROOT / "recipes").glob("digits*.toml")):
        recipe = recipes.load(path)
        data = load(recipe, ROOT, ())
        splits = split(data, split_sizes(recipe))
        torch.manual_seed(int(generator.integers(2**31)))
        model = build(recipe, data.shape, len(data.classes))
        initialise(model, torch.from_numpy(splits.train.x))
        fold(model.eval())
        files = export(model, fitted_detectors(model, splits.train, recipe, data.shape))
        runtime = runtime_of(model, files)
        draws = min(DRAWS, model.posterior.max_draws or DRAWS)
        eps = noise(
            runtime.algorithm, int(generator.integers(2**31)), 0, draws, runtime.noise_dimension
        )
        theta = runtime.sample(eps)
        sampler = core.compile_model(core.read_model(files["sampler.onnx"]), "CPU", exact)
        yield theta, np.asarray(sampler({"eps": eps})["theta"])
        x = splits.test.x[:ROWS].astype(np.float32)
        read = core.read_model(files["network.onnx"])
        read.reshape({"x": x.shape, "theta": (draws, 1, runtime.theta_dimension)})
        network = core.compile_model(read, "CPU", exact)
        theirs = network({"x": x, "theta": theta[:, None]})
        outputs, density = runtime.run(x, theta[:, None])
        yield outputs, np.asarray(theirs[runtime.output])
        their_density = np.asarray(theirs["density"])
        size = np.maximum(np.abs(their_density), 1.0)
        yield density / size, their_density / size
