package castagnoli

import (
	"hash/crc32"
	"os"
	"slices"
	"strings"
	"testing"
	"time"
)

// On processors that the kernel reports as able, bytes are folded, and folding is faster: the
// best of many short turns each, so that other work on the machine does not count.
func TestFolds(t *testing.T) {
	info, err := os.ReadFile("/proc/cpuinfo")
	if err != nil {
		t.Fatal(err)
	}
	_, flags, _ := strings.Cut(string(info), "\nflags")
	flags, _, _ = strings.Cut(flags, "\n")
	has := strings.Fields(flags)
	if can := slices.Contains(has, "avx512f") && slices.Contains(has, "vpclmulqdq"); can != folds {
		t.Fatalf("bytes are folded: %v; the kernel says the processor can: %v", folds, can)
	} else if !can {
		return
	}
	p := bytesOf(64 << 10)
	best := func(was time.Duration, sum func()) time.Duration {
		begun := time.Now()
		sum()
		return min(was, time.Since(begun))
	}
	fast, plain := time.Hour, time.Hour
	for range 2000 {
		fast = best(fast, func() { Update(0, p) })
		plain = best(plain, func() { crc32.Update(0, table, p) })
	}
	if fast*10 > plain*8 { // 0.47 is measured
		t.Errorf("64 KiB take %v folded, %v plainly", fast, plain)
	}
}
