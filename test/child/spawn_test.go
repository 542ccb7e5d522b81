package child

import (
	"os/exec"
	"runtime"
	"sync"
	"testing"
	"time"
)

// TestSpawnedOutlivesThread: a command is killed with this process, not with the thread of the
// caller.
func TestSpawnedOutlivesThread(t *testing.T) {
	cmds := make([]*exec.Cmd, 4) // one of the threads may be the process's first thread, which stays
	var threads, started sync.WaitGroup
	started.Add(len(cmds))
	for i := range cmds {
		cmds[i] = exec.Command("sleep", "60")
		threads.Go(func() {
			runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
			err := Spawn(cmds[i])
			started.Done()
			started.Wait()
			if err != nil {
				t.Error(err)
			}
		})
	}
	threads.Wait()
	ended := make(chan error)
	for _, cmd := range cmds {
		go func() { ended <- cmd.Wait() }()
	}
	select {
	case err := <-ended:
		t.Errorf("it ended with the thread: %v", err)
		cmds = cmds[1:]
	case <-time.After(200 * time.Millisecond):
	}
	for _, cmd := range cmds {
		_ = cmd.Process.Kill()
	}
	for range cmds {
		<-ended
	}
}
