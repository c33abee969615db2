// Call the service at a URL with types from openapi-typescript. Prints JSON.
import createClient from "openapi-fetch";
import type { components, paths } from "./api.js";

declare const process: { argv: string[] };

type Json = "application/json" | "application/problem+json";

const row: number[] = new Array(64).fill(8);

const client = createClient<paths, Json>({ baseUrl: process.argv[2] });
const predicted = await client.POST("/predict", { body: { inputs: [row], seed: 7 } });
const first = predicted.data!.predictions[0] as components["schemas"]["PredictionAnswer"];
const ranked = await client.POST("/acquire", { body: { pool: [row], k: 1 } });
const missing = await client.GET("/models/{name}", { params: { path: { name: "nothing" } } });
const model = await client.GET("/models/{name}", { params: { path: { name: "digits" } } });
// @ts-expect-error not a number
const wrong = await client.POST("/predict", { body: { inputs: [row], seed: "7" } });
const jobs = await client.GET("/jobs");
console.log(
  JSON.stringify({
    label: first.label,
    entropy: first.entropy,
    ranked: ranked.data!.ranking[0].index,
    refused: wrong.error!.detail,
    missing: missing.error!.status,
    classes: model.data!.classes,
    jobs: jobs.data!.jobs,
  }),
);
