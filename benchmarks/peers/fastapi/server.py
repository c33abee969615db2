"""FastAPI with torch on one thread, without batching."""

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor

import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel

from benchmarks.peers.posterior import load_predictor


class Request(BaseModel):
    inputs: list[list[float]]


predict = load_predictor()
worker = ThreadPoolExecutor(max_workers=1)
app = FastAPI()


@app.post("/predict")
async def answer(request: Request) -> dict[str, list[list[float]]]:
    return {
        "probabilities": await asyncio.get_running_loop().run_in_executor(
            worker, predict, request.inputs
        )
    }


if __name__ == "__main__":
    uvicorn.run(app, host="127.0.0.1", port=int(os.environ["PEER_PORT"]), log_level="warning")
