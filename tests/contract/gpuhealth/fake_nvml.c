/* A libnvidia-ml.so.1 that plays any fault, for tests under the real Python binding.
 *
 * Every call reads the file named by FAKE_NVML: lines "key=number". A key that is a function's name makes that function
 * return the number; "hang=1" makes every call block until the line is gone. Other keys are values, with defaults.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct { unsigned long long total, free, used; } memory_t;
typedef struct { unsigned gpu, memory; } utilization_t;
typedef union { double d; unsigned ui; unsigned long long ull; } value_t;
typedef struct { unsigned field, scope; long long timestamp, latency; unsigned type, result; value_t value; } field_t;
typedef struct { void *device; unsigned long long type, data; unsigned gpu_instance, compute_instance; } event_t;

static long look(const char *key, long otherwise) {
  char line[128];
  const char *path = getenv("FAKE_NVML");
  FILE *file = path ? fopen(path, "r") : NULL;
  size_t length = strlen(key);
  if (!file) return otherwise;
  while (fgets(line, sizeof line, file))
    if (!strncmp(line, key, length) && line[length] == '=') otherwise = atol(line + length + 1);
  fclose(file);
  return otherwise;
}

static int enter(const char *name) {
  while (look("hang", 0)) usleep(10000);
  return (int)look(name, 0);
}

#define CALL(name, ...) int name(__VA_ARGS__) { int result = enter(#name); if (result) return result;

CALL(nvmlInitWithFlags, unsigned flags) (void)flags; return 0; }
CALL(nvmlShutdown, void) return 0; }
CALL(nvmlDeviceGetCount_v2, unsigned *count) *count = (unsigned)look("count", 1); return 0; }
CALL(nvmlDeviceGetHandleByIndex_v2, unsigned index, void **device) *device = (void *)(long)(index + 1); return 0; }
CALL(nvmlDeviceGetUUID, void *device, char *text, unsigned size) snprintf(text, size, "GPU-%ld", (long)device); return 0; }
CALL(nvmlDeviceGetName, void *device, char *text, unsigned size) (void)device; snprintf(text, size, "Fake GPU"); return 0; }
CALL(nvmlDeviceGetTemperature, void *device, int sensor, unsigned *value)
  (void)device; (void)sensor; *value = (unsigned)look("temperature", 40); return 0; }
CALL(nvmlDeviceGetTemperatureThreshold, void *device, int kind, unsigned *value)
  (void)device; (void)kind; *value = (unsigned)look("limit", 90); return 0; }
CALL(nvmlDeviceGetPowerUsage, void *device, unsigned *value) (void)device; *value = (unsigned)look("milliwatts", 70000); return 0; }
CALL(nvmlDeviceGetMemoryInfo, void *device, memory_t *memory)
  (void)device; memory->total = 80ull << 30; memory->used = 1ull << 30; memory->free = memory->total - memory->used; return 0; }
CALL(nvmlDeviceGetUtilizationRates, void *device, utilization_t *rates)
  (void)device; rates->gpu = (unsigned)look("utilization", 5); rates->memory = 1; return 0; }
CALL(nvmlDeviceGetTotalEccErrors, void *device, int kind, int counter, unsigned long long *value)
  (void)device; (void)counter; *value = (unsigned long long)look(kind ? "uncorrected" : "corrected", 0); return 0; }
CALL(nvmlDeviceGetRemappedRows, void *device, unsigned *corrected, unsigned *uncorrected, unsigned *pending, unsigned *failure)
  (void)device; *corrected = *uncorrected = 0; *pending = (unsigned)look("pending", 0);
  *failure = (unsigned)look("failure", 0); return 0; }
CALL(nvmlDeviceGetEccMode, void *device, unsigned *now, unsigned *then) (void)device; *now = *then = 1; return 0; }
CALL(nvmlDeviceGetPersistenceMode, void *device, unsigned *mode) (void)device; *mode = 1; return 0; }
CALL(nvmlDeviceGetFieldValues, void *device, int count, field_t *fields)
  (void)device;
  for (int i = 0; i < count; i++) {
    fields[i].type = 1; /* unsigned int */
    fields[i].result = (unsigned)look(fields[i].field == 230 ? "recovery_result" : "field_result", 0);
    fields[i].value.ui = (unsigned)look(fields[i].field == 230 ? "recovery" : "memory_temperature", 0);
  }
  return 0; }
CALL(nvmlEventSetCreate, void **set) *set = (void *)1; return 0; }
CALL(nvmlEventSetFree, void *set) (void)set; return 0; }
CALL(nvmlDeviceGetSupportedEventTypes, void *device, unsigned long long *types) (void)device; *types = 8; return 0; }
CALL(nvmlDeviceRegisterEvents, void *device, unsigned long long types, void *set)
  (void)device; (void)types; (void)set; return 0; }
CALL(nvmlEventSetWait_v2, void *set, event_t *event, unsigned timeout)
  static long seen; /* one event for each new value of xid_number */
  long number = look("xid_number", 0);
  (void)set; (void)timeout;
  if (number == seen) return 10; /* timeout: no more */
  seen = number;
  event->device = (void *)1; event->type = 8; event->data = (unsigned long long)look("xid", 0);
  return 0; }
/* nvmlDeviceGetMigMode, nvmlDeviceGetRepairStatus and the PCIe calls are missing, as from an older driver. */
