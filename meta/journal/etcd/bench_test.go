package etcd_test

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"penstock.io/penstock/meta/journal/etcd"
)

// BenchmarkAppend appends to a volume's journal, one entry at a time, and trims the journal every
// 8 MiB; cpu-us/op is of the whole process, etcd included.
func BenchmarkAppend(b *testing.B) {
	for _, way := range []string{"inprocess", "socket"} {
		for _, size := range []int{200, 4 << 10, 64 << 10, 512 << 10} {
			b.Run(fmt.Sprintf("%s/%d", way, size), func(b *testing.B) {
				s := server(b)
				cli := s.Client()
				if way == "socket" {
					c, err := clientv3.New(clientv3.Config{Endpoints: []string{s.Endpoint()}, Logger: zap.NewNop()})
					if err != nil {
						b.Fatal(err)
					}
					b.Cleanup(func() { c.Close() })
					cli = c
				}
				w := newScribe(b, owners(b, cli, "a", etcd.LeaseConfig{TTL: time.Minute}), 1)
				payload := noise(rand.New(rand.NewPCG(1, 2)), size)
				b.SetBytes(int64(size))
				b.ResetTimer()
				began, since := cpu(b), 0
				for b.Loop() {
					if err := w.append(b.Context(), payload); err != nil {
						b.Fatal(err)
					}
					if since += size; since > 8<<20 {
						since = 0
						if err := w.trim(b.Context()); err != nil {
							b.Fatal(err)
						}
					}
				}
				b.ReportMetric(float64((cpu(b)-began).Microseconds())/float64(b.N), "cpu-us/op")
				db, _, err := s.DBSize(b.Context())
				if err != nil {
					b.Fatal(err)
				}
				b.ReportMetric(float64(db>>10), "db-KiB")
			})
		}
	}
}

// cpu is the processor time of this process.
func cpu(b *testing.B) time.Duration {
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
