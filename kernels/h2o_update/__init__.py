from kernels.h2o_update.api import h2o_update

__all__ = ["h2o_update"]
