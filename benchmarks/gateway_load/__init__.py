"""The load of the gateway's benchmark, and the processes that it is measured between: a
paced stand-in engine, the real router and two gateways."""
