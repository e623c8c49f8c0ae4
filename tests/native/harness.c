// Runs the native kernels without XLA and without Python, so that kernels for another machine run
// in an emulator.
//
//   harness vectors                 checks the functions of vectors.h and numbers.h
//   harness check                   exits with the status of jaxembed_check
//   harness CALLS DATA RESULTS N    makes calls in N threads, as XLA does, and writes their results
//
// CALLS is a text with lines of four kinds. A call is made at its last line, `result`. Operands and
// attributes come in any order; their data follow each other in DATA.
//
//   call NAME
//   attribute NAME s64|f32 VALUE
//   operand NAME DTYPE RANK SIZE...
//   result DTYPE RANK SIZE...
//
// Operands cannot be written, and before and behind each operand and result lies a page that cannot
// be accessed: a kernel that does so crashes. Each call is made twice, with buffers that begin after
// the first of these pages, and with buffers that end at the second one.
#include "native.c"

#include <pthread.h>
#include <unistd.h>

#include "vectors_check.h"

enum { MOST_NAME = 64 };

typedef struct {
  char name[MOST_NAME];
  XLA_FFI_Buffer buffer;
  int64_t dims[MOST_AXES];
  size_t bytes;
} Tensor;

typedef struct {
  char name[MOST_NAME];
  XLA_FFI_ByteSpan span;
  XLA_FFI_Scalar scalar;
  int64_t whole;
  float real;
} Value;

typedef struct {
  char name[MOST_NAME];
  Tensor operands[MOST_OPERANDS], result;
  Value values[MOST_ATTRIBUTES];
  int64_t operand_count, value_count;
} Read;

static int64_t pool_threads;
static atomic_int running_tasks;

static void stop(const char* message) {
  fprintf(stderr, "%s\n", message);
  exit(1);
}

typedef struct {
  XLA_FFI_Task* run;
  void* data;
} Task;

static void* run_task(void* argument) {
  Task task = *(Task*)argument;
  free(argument);
  task.run(task.data);
  atomic_fetch_sub(&running_tasks, 1);
  return NULL;
}

// The functions of XLA that kernels call. An error is printed, and ends the program. Each task runs
// in a thread of its own.
static XLA_FFI_Error* create_error(XLA_FFI_Error_Create_Args* args) {
  stop(args->message);
  return NULL;
}
static void destroy_error(XLA_FFI_Error_Destroy_Args* args) { (void)args; }
static XLA_FFI_Error* count_threads(XLA_FFI_ThreadPool_NumThreads_Args* args) {
  *args->num_threads = pool_threads;
  return NULL;
}
static XLA_FFI_Error* schedule(XLA_FFI_ThreadPool_Schedule_Args* args) {
  Task* task = malloc(sizeof *task);
  pthread_t thread;
  *task = (Task){args->task, args->data};
  atomic_fetch_add(&running_tasks, 1);
  if (pthread_create(&thread, NULL, run_task, task) || pthread_detach(thread)) stop("no thread");
  return NULL;
}
static const XLA_FFI_Api api = {.struct_size = XLA_FFI_Api_STRUCT_SIZE,
                                .XLA_FFI_Error_Create = create_error,
                                .XLA_FFI_Error_Destroy = destroy_error,
                                .XLA_FFI_ThreadPool_NumThreads = count_threads,
                                .XLA_FFI_ThreadPool_Schedule = schedule};

// Memory between two pages that cannot be accessed. It begins after the first one or ends at the
// second one.
static void* guarded(size_t size, int at_end) {
  const size_t page = (size_t)sysconf(_SC_PAGESIZE), whole = (size + page - 1) / page * page;
  char* start = mmap(NULL, whole + 2 * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (start == MAP_FAILED || mprotect(start + page, whole, PROT_READ | PROT_WRITE))
    stop("no memory");
  return start + page + (at_end ? whole - size : 0);
}

static void release(void* data, size_t size) {
  const size_t page = (size_t)sysconf(_SC_PAGESIZE), whole = (size + page - 1) / page * page;
  munmap((char*)((uintptr_t)data / page * page) - page, whole + 2 * page);
}

static void make_read_only(void* data, size_t size) {
  const size_t page = (size_t)sysconf(_SC_PAGESIZE);
  const uintptr_t start = (uintptr_t)data / page * page;
  if (mprotect((void*)start, (uintptr_t)data + size - start, PROT_READ)) stop("no protection");
}

// Read a dtype and a shape.
static void read_shape(FILE* calls, Tensor* tensor) {
  static const struct {
    const char* name;
    XLA_FFI_DataType dtype;
    size_t size;
  } dtypes[] = {{"float32", XLA_FFI_DataType_F32, 4}, {"bfloat16", XLA_FFI_DataType_BF16, 2},
                {"int32", XLA_FFI_DataType_S32, 4}, {"int8", XLA_FFI_DataType_S8, 1}};
  char name[MOST_NAME];
  long long rank, size;
  if (fscanf(calls, "%63s %lld", name, &rank) != 2 || rank > MOST_AXES) stop("no shape");
  tensor->bytes = 0;
  tensor->buffer = (XLA_FFI_Buffer){.rank = rank, .dims = tensor->dims};
  for (size_t i = 0; i < sizeof dtypes / sizeof *dtypes; i++)
    if (!strcmp(name, dtypes[i].name))
      tensor->buffer.dtype = dtypes[i].dtype, tensor->bytes = dtypes[i].size;
  if (!tensor->bytes) stop("unknown dtype");
  for (int64_t i = 0; i < rank; i++) {
    if (fscanf(calls, "%lld", &size) != 1) stop("no size");
    tensor->dims[i] = size;
    tensor->bytes *= (size_t)size;
  }
}

// Read an attribute.
static void read_value(FILE* calls, Value* value) {
  char dtype[MOST_NAME];
  long long whole;
  if (fscanf(calls, "%63s %63s", value->name, dtype) != 2) stop("no attribute");
  value->span = (XLA_FFI_ByteSpan){value->name, strlen(value->name)};
  if (strcmp(dtype, "f32")) {
    if (fscanf(calls, "%lld", &whole) != 1) stop("no value");
    value->whole = whole;
    value->scalar = (XLA_FFI_Scalar){XLA_FFI_DataType_S64, &value->whole};
  } else {
    if (fscanf(calls, "%f", &value->real) != 1) stop("no value");
    value->scalar = (XLA_FFI_Scalar){XLA_FFI_DataType_F32, &value->real};
  }
}

static XLA_FFI_Handler* handler_of(const char* name) {
  static const struct {
    const char* name;
    XLA_FFI_Handler* handler;
  } handlers[] = {{"linear", jaxembed_linear}, {"attention", jaxembed_attention},
                  {"joint_attention", jaxembed_joint_attention},
                  {"self_attention", jaxembed_self_attention}, {"mlp", jaxembed_mlp}};
  for (size_t i = 0; i < sizeof handlers / sizeof *handlers; i++)
    if (!strcmp(handlers[i].name, name)) return handlers[i].handler;
  stop("unknown call");
  return NULL;
}

// Make a call whose buffers have data, with the operands in the order of the library.
static void make(Read* call) {
  void *operands[MOST_OPERANDS], *results[] = {&call->result.buffer};
  XLA_FFI_ArgType arg_types[MOST_OPERANDS];
  XLA_FFI_RetType ret_type = XLA_FFI_RetType_BUFFER;
  XLA_FFI_ByteSpan* names[MOST_ATTRIBUTES];
  XLA_FFI_AttrType attribute_types[MOST_ATTRIBUTES];
  void* attributes[MOST_ATTRIBUTES];
  int64_t mode = 0;
  for (int64_t i = 0; i < call->value_count; i++) {
    names[i] = &call->values[i].span;
    attribute_types[i] = XLA_FFI_AttrType_SCALAR;
    attributes[i] = &call->values[i].scalar;
    if (!strcmp(call->values[i].name, "mode")) mode = call->values[i].whole;
  }
  for (int64_t i = 0; i < call->operand_count; i++) {
    const char* name = jaxembed_operand(call->name, mode, i);
    operands[i] = NULL;
    arg_types[i] = XLA_FFI_ArgType_BUFFER;
    for (int64_t k = 0; k < call->operand_count; k++)
      if (name && !strcmp(call->operands[k].name, name)) operands[i] = &call->operands[k].buffer;
    if (!operands[i]) stop("an operand is missing or unknown");
  }
  XLA_FFI_CallFrame frame = {
      .struct_size = XLA_FFI_CallFrame_STRUCT_SIZE,
      .api = &api,
      .stage = XLA_FFI_ExecutionStage_EXECUTE,
      .args = {.size = call->operand_count, .types = arg_types, .args = operands},
      .rets = {.size = 1, .types = &ret_type, .rets = results},
      .attrs = {.size = call->value_count, .types = attribute_types, .names = names,
                .attrs = attributes}};
  if (handler_of(call->name)(&frame)) stop("an error");
  while (atomic_load(&running_tasks)) sched_yield();
}

// Make a call at both places of its buffers, and write both results.
static void make_twice(Read* call, FILE* data, FILE* results) {
  const long start = ftell(data);
  for (int at_end = 0; at_end < 2; at_end++) {
    fprintf(stderr, "%s, buffers %s a page\n", call->name, at_end ? "before" : "after");
    if (fseek(data, start, SEEK_SET)) stop("no data");
    for (int64_t i = 0; i < call->operand_count; i++) {
      Tensor* operand = &call->operands[i];
      operand->buffer.data = guarded(operand->bytes, at_end);
      if (fread(operand->buffer.data, 1, operand->bytes, data) != operand->bytes) stop("no data");
      make_read_only(operand->buffer.data, operand->bytes);
    }
    call->result.buffer.data = guarded(call->result.bytes, at_end);
    memset(call->result.buffer.data, 0xff, call->result.bytes);  // NaN
    make(call);
    if (fwrite(call->result.buffer.data, 1, call->result.bytes, results) != call->result.bytes)
      stop("cannot write");
    release(call->result.buffer.data, call->result.bytes);
    for (int64_t i = 0; i < call->operand_count; i++)
      release(call->operands[i].buffer.data, call->operands[i].bytes);
  }
}

int main(int count, char** arguments) {
  if (count == 2 && !strcmp(arguments[1], "check")) return jaxembed_check();
  if (count == 2 && !strcmp(arguments[1], "vectors")) return check_vectors();
  if (count != 5) stop("wrong arguments");
  FILE *calls = fopen(arguments[1], "r"), *data = fopen(arguments[2], "rb");
  FILE* results = fopen(arguments[3], "wb");
  if (!calls || !data || !results) stop("cannot open a file");
  pool_threads = atoll(arguments[4]);
  if (jaxembed_prepare()) stop("AMX may not be used");
  static Read call;
  char line[MOST_NAME];
  while (fscanf(calls, "%63s", line) == 1) {
    if (!strcmp(line, "call")) {
      call.operand_count = call.value_count = 0;
      if (fscanf(calls, "%63s", call.name) != 1) stop("no name");
    } else if (!strcmp(line, "attribute")) {
      if (call.value_count == MOST_ATTRIBUTES) stop("too many attributes");
      read_value(calls, &call.values[call.value_count++]);
    } else if (!strcmp(line, "operand")) {
      if (call.operand_count == MOST_OPERANDS) stop("too many operands");
      Tensor* operand = &call.operands[call.operand_count++];
      if (fscanf(calls, "%63s", operand->name) != 1) stop("no name");
      read_shape(calls, operand);
    } else if (!strcmp(line, "result")) {
      read_shape(calls, &call.result);
      make_twice(&call, data, results);
    } else {
      stop("unknown line");
    }
  }
  return fclose(results) ? 1 : 0;
}
