"""Trees, growth, acceptance, policy, step timings and limits: pure, without I/O, threads or backends."""
