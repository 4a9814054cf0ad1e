"""Records -> figures. Pure functions over records and pandas frames; no torch, no SGLang, nothing measured here.

metrics       block_metrics(Block) -> BlockMetrics; request_latencies(Block) -> Latencies
quantity      Quantity (a figure or the reason why there is none); percentile(values, q) -> Quantity
frame         blocks(records, exclude) -> one row per block; launches(blocks) -> one per record; kernels(records);
              points(launches) -> Point(key, variant, rows) with .arms, .sample(arm, metric), .step_shares(arm)
stats         Sample = {launch id: value}; mean_interval, difference, ratio, contrast_ratio -> Interval; instability
attribution   attribute(rungs), attribute_reported(tok_s) -> Attribution; shapley(...) -> ShapleySplit
amdahl        check(point, path) -> AmdahlCheck, or a sentence when attention was not timed; speedup, required_share
kernel_share  measured_or_derived(point, path, baseline, kernel_times(rows)) -> AmdahlCheck, or a sentence
compare       compare(first, second, metrics) -> Comparison(pairs, mismatches, unmatched)
requests      requests(records) -> one row per request; latency_percentiles(record)
comparable    environment_mismatches, case_mismatches, measured_mismatches -> Mismatch (key and both values)
gate          judge.evaluate(baseline, candidate, GateConfig, anchor) -> GateResult(outcome, exit_code, reasons, ...);
              arms turns records into the arrays of family, the statistics; selftest.self_test(rule) and
              replay(records, config) -> [Rate(name, red, low, high, bound, ok)]
claims        reported.load_claims() -> (Claim, ...) from conf/claims.yaml; scorecard.scorecard(records) ->
              [ScoreRow(claim, Finding(verdict, why, measured, estimate, hardware, record_ids))]; kernel, serving and
              dispatch hold one judge per claim, evidence what they share
dispatcher    calibration.calibrate(kernel records) -> profile and fit; regret of rules; thresholds; host time
roofline      model.step_time(gpu, model, load, path) -> StepTime; checks loads conf/hardware.yaml, fit fits it and
              gives residuals, on_paper(hardware) is the seed's machine; records adds ours;
              predict.predict(model, fitted, load, largest_suffix) -> [Prediction(step_ms, tok_s, speedup, pays)]
"""
