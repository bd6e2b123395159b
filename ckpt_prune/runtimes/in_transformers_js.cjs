// transformers.js: runs a graph on the windows of FOLDER/task.json, and writes logits.bin and figures.json there.
const fs = require("fs");
const path = require("path");
const here = require("module").createRequire(path.join(process.cwd(), "package.json")); // an empty folder: NODE_PATH

async function run(place) {
  const { env, AutoModelForCausalLM, AutoTokenizer, Tensor } = here("@huggingface/transformers");
  const task = JSON.parse(fs.readFileSync(path.join(place, "task.json")));
  env.allowRemoteModels = false;
  env.localModelPath = path.dirname(task.folder) + path.sep;
  const model = await AutoModelForCausalLM.from_pretrained(path.basename(task.folder), {
    subfolder: "",
    dtype: "fp32",
    session_options: { intraOpNumThreads: task.threads },
  });
  const inputs = (ids) => ({
    input_ids: new Tensor("int64", BigInt64Array.from(ids, BigInt), [1, ids.length]),
    attention_mask: new Tensor("int64", new BigInt64Array(ids.length).fill(1n), [1, ids.length]),
  });
  const file = fs.openSync(path.join(place, "logits.bin"), "w");
  for (const window of task.windows) {
    const { logits } = await model(inputs(window.slice(0, -1)));
    const width = logits.dims[2];
    for (const position of task.positions) {
      fs.writeSync(file, Float32Array.from(logits.data.subarray((position - 1) * width, position * width)));
    }
  }
  fs.closeSync(file);
  const prompt = inputs(task.windows[0].slice(0, task.windows[0].length - task.generate));
  const seconds = [];
  for (const count of [1, task.generate]) {
    const start = performance.now();
    await model.generate({ ...prompt, max_new_tokens: count, min_new_tokens: count, do_sample: false });
    seconds.push((performance.now() - start) / 1000);
  }
  const tokenizer = await AutoTokenizer.from_pretrained(path.basename(task.folder));
  const tokens = task.texts.map((text) => tokenizer.encode(text));
  const figures = { seconds, tokens, memory: process.resourceUsage().maxRSS * 1024 };
  fs.writeFileSync(path.join(place, "figures.json"), JSON.stringify(figures));
}

run(process.argv[2]).then(
  () => process.exit(0),
  (error) => {
    console.error(String((error && error.message) || error).replaceAll("\n", " "));
    process.exit(1);
  },
);
