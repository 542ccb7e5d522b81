package penstock

import (
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"testing"
	"unsafe"

	"penstock.io/penstock/meta"
)

// TestInodeMemory: a cached inode with its name takes less than 500 bytes.
func TestInodeMemory(t *testing.T) {
	// In a separate process: garbage of other tests would be freed during the count.
	if os.Getenv("PENSTOCK_TEST_ALONE") == "" {
		cmd := exec.Command(os.Args[0], "-test.run=^TestInodeMemory$", "-test.v")
		cmd.Env = append(os.Environ(), "PENSTOCK_TEST_ALONE=1")
		out, err := cmd.CombinedOutput()
		if t.Logf("%s", out); err != nil {
			t.Error(err)
		}
		return
	}
	w := newWorld(t, meta.Policy{Replicas: 1})
	_, v := open(t, w, Config{})
	dir := v.node(1000)
	heap := func() uint64 {
		var m runtime.MemStats
		runtime.GC()
		runtime.GC() // frees the contents of pools
		runtime.ReadMemStats(&m)
		return m.HeapAlloc
	}
	before := heap()
	const n = 100_000
	for i := range n {
		ino := meta.Ino(2000 + i)
		v.c.Granted(1, meta.Grant{Ino: ino, Mode: meta.LeaseShared})
		v.learn(&meta.Attr{Ino: ino, Mode: meta.TypeRegular, Change: 1}, stamp{tick: v.c.table.tick.Load()})
		dir.mu.Lock()
		dir.setNameLocked(fmt.Sprintf("image-%08d.jpg", i), dent{ino: ino})
		dir.mu.Unlock()
	}
	each := (heap() - before) / n
	t.Logf("%d bytes each; inode %d, file %d, segment %d", each, unsafe.Sizeof(inode{}), unsafe.Sizeof(file{}), unsafe.Sizeof(segment{}))
	if each >= 500 {
		t.Errorf("a cached inode with its name takes %d bytes", each)
	}
	runtime.KeepAlive(v)
}
