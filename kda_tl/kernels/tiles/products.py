"""Matrix products of a block: tensor cores for narrow operands, float32 multiply-adds for wide ones."""

import tilelang.language as T


@T.macro
def product(t, a, b, total, rows, columns, inner, transpose_A=False, transpose_B=False):
    """total [rows, columns] += a b. Operands in shared memory, total a float32 fragment.

    Tensor cores would round float32 operands to TF32, ten bits; that is why the float32 path does without them.
    """
    if t.is_cpu or a.dtype != "float32":
        T.gemm(a, b, total, transpose_A=transpose_A, transpose_B=transpose_B)
    else:
        for i, j in T.Parallel(rows, columns):
            for m in T.serial(inner):
                if transpose_A:
                    total[i, j] = total[i, j] + a[m, i] * b[m, j]
                elif transpose_B:
                    total[i, j] = total[i, j] + a[i, m] * b[j, m]
                else:
                    total[i, j] = total[i, j] + a[i, m] * b[m, j]
