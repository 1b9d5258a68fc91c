/* Copies between host memories that go round the cache on their way out.
 *
 * A plain store first reads the line that it is about to overwrite, and leaves it in the cache, where it is in
 * the way of what is copied next: three transfers for two. Weights are many times the size of a cache, and are
 * overwritten as a whole, so that streaming stores are the right ones from a few lines on. The C library takes
 * them for tens of mebibytes in one piece only; pieces of a strided copy are some kibibytes long.
 *
 * Addresses come as integers: streams.py has checked that all that they lead to is there.
 */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030A0000
#include <Python.h>
#include <stdint.h>
#include <string.h>

#define LINE 64
#define SHORTEST 128          /* bytes of a piece from which on streaming pays */
#define UNDIVIDED (256 << 10) /* bytes of a group of copies that one thread carries out alone */

typedef void (*Move)(char *to, const char *from, size_t nbytes);

static void plain(char *to, const char *from, size_t nbytes) { memcpy(to, from, nbytes); }

#if defined(__x86_64__)
#include <immintrin.h>

__attribute__((target("avx2"))) static void streamed(char *to, const char *from, size_t nbytes)
{
    size_t head = (size_t)(-(uintptr_t)to) & (LINE - 1);
    if (nbytes < SHORTEST || nbytes < head + LINE) {
        memcpy(to, from, nbytes);
        return;
    }
    memcpy(to, from, head);
    to += head;
    from += head;
    nbytes -= head;
    size_t at = 0;
    for (; at + 2 * LINE <= nbytes; at += 2 * LINE) {
        __m256i a = _mm256_loadu_si256((const __m256i *)(from + at));
        __m256i b = _mm256_loadu_si256((const __m256i *)(from + at + 32));
        __m256i c = _mm256_loadu_si256((const __m256i *)(from + at + 64));
        __m256i d = _mm256_loadu_si256((const __m256i *)(from + at + 96));
        _mm256_stream_si256((__m256i *)(to + at), a);
        _mm256_stream_si256((__m256i *)(to + at + 32), b);
        _mm256_stream_si256((__m256i *)(to + at + 64), c);
        _mm256_stream_si256((__m256i *)(to + at + 96), d);
    }
    memcpy(to + at, from + at, nbytes - at);
}

static int streams(void) { return __builtin_cpu_supports("avx2"); }
static void settle(void) { _mm_sfence(); } /* streaming stores are seen by others only after this */
#else
static void streamed(char *to, const char *from, size_t nbytes) { plain(to, from, nbytes); }
static int streams(void) { return 0; }
static void settle(void) { }
#endif

typedef struct {
    int64_t dims;
    const int64_t *to, *from, *piece; /* (copies,) addresses of the first bytes; bytes of a piece */
    const int64_t *shape, *to_strides, *from_strides; /* (copies, dims) loops over pieces; bytes */
    const int64_t *first; /* (groups + 1,) of each group's copies: they have one `shape` and `from_strides` */
} Table;

/* What one of several threads does of a group. */
typedef struct {
    int64_t row, stop;   /* rows, `stop` excluded; of each one piece of every copy, in turn */
    int64_t part, parts; /* and of each piece this part, cut by bytes */
} Share;

static void carry_out(const Table *t, int64_t group, Share share, int64_t *index, Move move)
{
    const int64_t first = t->first[group], last = t->first[group + 1], dims = t->dims;
    const int64_t *shape = t->shape + first * dims, *steps = t->from_strides + first * dims;
    for (int64_t d = dims - 1, left = share.row; d >= 0; d--) {
        index[d] = left % shape[d];
        left /= shape[d];
    }
    for (int64_t row = share.row; row < share.stop; row++) {
        int64_t from = 0;
        for (int64_t d = 0; d < dims; d++)
            from += index[d] * steps[d];
        for (int64_t i = first; i < last; i++) {
            int64_t to = t->to[i], begin = 0, end = t->piece[i];
            for (int64_t d = 0; d < dims; d++)
                to += index[d] * t->to_strides[i * dims + d];
            if (share.parts > 1) {
                begin = end * share.part / share.parts / LINE * LINE;
                if (share.part + 1 < share.parts)
                    end = end * (share.part + 1) / share.parts / LINE * LINE;
            }
            move((char *)(intptr_t)(to + begin), (const char *)(intptr_t)(t->from[i] + from + begin),
                 (size_t)(end - begin));
        }
        for (int64_t d = dims - 1; d >= 0; d--) {
            if (++index[d] < shape[d])
                break;
            index[d] = 0;
        }
    }
}

static void all_groups(const Table *t, int64_t groups, int64_t part, int64_t parts, int64_t *index)
{
    Move move = streams() ? streamed : plain;
    for (int64_t g = 0; g < groups; g++) {
        const int64_t first = t->first[g], last = t->first[g + 1];
        int64_t count = 1, width = 0;
        for (int64_t d = 0; d < t->dims; d++)
            count *= t->shape[first * t->dims + d];
        for (int64_t i = first; i < last; i++)
            width += t->piece[i];
        if (count == 0)
            continue;
        Share share = {0, count, 0, 1};
        if (count * width <= UNDIVIDED) {
            if (g % parts != part)
                continue;
        } else if (count < 4 * parts) { /* so few rows cannot be dealt out evenly */
            share.part = part;
            share.parts = parts;
        } else {
            share.row = count * part / parts;
            share.stop = count * (part + 1) / parts;
        }
        carry_out(t, g, share, index, move);
    }
    settle();
}

static PyObject *copy(PyObject *module, PyObject *args)
{
    (void)module;
    long long at[7], groups, dims, part, parts;
    if (!PyArg_ParseTuple(args, "LLLLLLLLLLL", &at[0], &at[1], &at[2], &at[3], &at[4], &at[5], &at[6],
                          &groups, &dims, &part, &parts))
        return NULL;
    if (groups < 0 || dims < 0 || parts < 1 || part < 0 || part >= parts) {
        PyErr_SetString(PyExc_ValueError, "groups and dims are 0 or more, and part is below parts");
        return NULL;
    }
#define COLUMN(n) ((const int64_t *)(intptr_t)at[n])
    Table table = {dims, COLUMN(0), COLUMN(1), COLUMN(2), COLUMN(3), COLUMN(4), COLUMN(5), COLUMN(6)};
#undef COLUMN
    int64_t *index = PyMem_Malloc((size_t)(dims + 1) * sizeof *index);
    if (index == NULL)
        return PyErr_NoMemory();
    Py_BEGIN_ALLOW_THREADS
    all_groups(&table, groups, part, parts, index);
    Py_END_ALLOW_THREADS
    PyMem_Free(index);
    Py_RETURN_NONE;
}

static PyObject *streaming(PyObject *module, PyObject *args)
{
    (void)module;
    (void)args;
    return PyBool_FromLong(streams());
}

static PyMethodDef methods[] = {
    {"copy", copy, METH_VARARGS, NULL},
    {"streaming", streaming, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_streams", NULL, 0, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__streams(void) { return PyModule_Create(&definition); }
