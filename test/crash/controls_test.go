package crash

import (
	"os"
	"os/exec"
	"strings"
	"testing"
)

// control switches one mechanism off and names the test that must then fail.
type control struct {
	name  string // value of ControlEnv
	guard func(t *testing.T, env string) error
}

// unitControls are guarded by tests of packages, which read the same variable.
var unitControls = []struct{ name, pkg, guard string }{
	{"chunk-nosync", "chunkserver/store", "TestCrash"},
	{"chunk-noverify", "chunkserver/store", "TestFlipData"},
	{"chunk-nofence", "chunkserver/store", "TestFence"},
	{"chunk-nofence", "chunkserver/store", "TestStoreIsTheMachine"},
	{"chunk-nosync", "chunkserver/store", "TestStoreIsTheMachine"},
	{"chunk-nocap", "chunkserver/client", "TestCapabilities"},
	{"chunk-ownclock", "chunkserver/server", "TestCapabilitiesBySkewedClocks"},
	{"chunk-ownclock", "meta/server", "TestChunkServersClocks"},
	{"client-nolaunder", "test/posix", "TestMapped"},
	{"client-nogrowthsync", ".", "TestToldGrowthIsSynced"},
	{"client-tellone", ".", "TestEachHandleHears"},
	{"client-nospacewait", ".", "TestRecallWaitsForSpace"},
	{"meta-norecall", "meta/server", "TestNamesAreRecalledBeforeTheyChange"},
	{"meta-noputin", "meta/server", "TestWhoGivesUpPutsIn"},
	{"meta-nowait", "meta/server", "TestNobodySeesWhatCouldBeLost"},
	{"meta-norecall", "test/snapshots", "TestAtomic"},
	{"meta-norecall", "meta/server", "TestImmutableTakesBackWhatWritersHold"},
	{"meta-norecall", "meta/server", "TestTrashHasWhatWasWritten"},
	{"meta-nopromise", "test/quota", "TestRace"},
	{"meta-nosquash", "meta/server", "TestSquashedClient"},
	{"meta-nopace", "meta/server", "TestFloodIsHeldUp"},
	{"meta-nofreeze", "meta/server", "TestGroupIsOneMoment"},
	{"meta-nocheckpointage", "meta/server", "TestCheckpointAgeOutlivesOwners"},
	{"meta-noend", "meta/server", "TestHurtOpenChunksAreRepaired"},
	{"meta-noend", "meta/server", "TestShortChunksAreFilled"},
	{"meta-noleast", "meta/server", "TestShortChunksAreFilled"},
	{"meta-nocourtesy", "meta/server", "TestLateSessionIsKept"},
	{"meta-nomeet", "meta/server", "TestPolicyHoldsWhenAnswered"},
	{"meta-nomeet", "meta/server", "TestPolicySetAgain"},
	{"meta-noreplaycheck", "meta/server", "TestClaimedReplays"},
	{"meta-notellpolicy", "meta/server", "TestPolicyIsFollowedWhenAnswered"},
	{"meta-noleadership", "meta/server", "TestLeadership"},
	{"meta-nostreams", "test/streams", "TestKcat"},
	{"meta-nolosswait", "meta/server", "TestSlowReplicaIsNotGivenUp"},
	{"meta-norules", "meta/server", "TestWhoMayCall"},
	{"admin-resend", "meta/admin", "TestSentOnce"},
	{"admin-resend", "meta/server", "TestLostAnswers"},
	{"journal-nofence", "test/failover", "TestLateCommit"},
	{"journal-nofence", "meta/journal/etcd", "TestSuite"},
	{"meta-norecall", "test/cluster", "TestPartitions"},
	{"meta-nolease", "test/cluster", "TestPartitions"},
	{"mount-nodrain", "fuse", "TestUmountWaits"},
	{"mount-nonamespace", "fuse", "TestLastInItsNamespace"},
	{"mirror-nodigest", "test/mirror", "TestPausedRound"},
	{"stream-nofence", "test/streams", "TestLateCompaction"},
	{"stream-noseal", "test/streams", "TestLateAppend"},
	{"stream-norights", "test/streams", "TestRights"},
	{"stream-norights", "test/streams", "TestMembers"},
	{"mount-noack", "test/streams", "TestInputWaits"},
	{"mount-newnames", "test/streams", "TestInput"},
	{"stream-nolate", "test/streams", "TestCommitOnAFormerConnection"},
	{"stream-noend", "test/streams", "TestLoginsEnd"},
	{"compact-noage", "stream/partition", "TestCompaction"},
	{"compact-noorder", "stream/partition", "TestTombstonesGoLast"},
	{"table-nobase", "stream/publish", "TestOvertaken"},
	{"table-nofence", "stream/publish", "TestSweep"},
	{"table-nonewest", "table/delta", "TestSleeper"},
	{"sim-nofence", "test/sim", "TestRandom"},
	{"sim-noorder", "test/sim", "TestRandom"},
	{"sim-noownerlease", "test/sim", "TestRandom"},
	{"sim-nowait", "test/sim", "TestRandom"},
	{"sim-norecall", "test/sim", "TestRandom"},
	{"sim-nocourtesy", "test/sim", "TestStoryLateSessionComesBack"},
	{"replica-fence", "test/sim/replicas", "TestRandom"},
	{"replica-compare", "test/sim/replicas", "TestRandom"},
	{"replica-offset", "test/sim/replicas", "TestRandom"},
	{"replica-keeptail", "test/sim/replicas", "TestRandom"},
	{"replica-short", "test/sim/replicas", "TestRandom"},
	{"replica-tomb", "test/sim/replicas", "TestRandom"},
	{"replica-olddelete", "test/sim/replicas", "TestRandom"},
	{"replica-freezesync", "test/sim/replicas", "TestRandom"},
	{"replica-ackall", "test/sim/replicas", "TestRandom"},
	{"replica-acklate", "test/sim/replicas", "TestRandom"},
	{"replica-longest", "test/sim/replicas", "TestRandom"},
	{"replica-bound", "test/sim/replicas", "TestRandom"},
	{"replica-empty", "test/sim/replicas", "TestRandom"},
	{"replica-tails", "test/sim/replicas", "TestRandom"},
	{"replica-return", "test/sim/replicas", "TestRandom"},
	{"replica-markinplace", "test/sim/replicas", "TestRandom"},
	{"replica-orphans", "test/sim/replicas", "TestRandom"},
	{"replica-members", "test/sim/replicas", "TestRandom"},
	{"replica-oldfences", "test/sim/replicas", "TestRandom"},
	{"replica-cutfirst", "test/sim/replicas", "TestRandom"},
	{"replica-pull", "test/sim/replicas", "TestRandom"},
}

// controlRounds is how many rounds a guard has to notice.
const controlRounds = 12

var allControls = []control{
	{"chunk-nosync", powerGuard},
	{"journal-nosync", powerGuard},
	{"chunk-noverify", flipGuard},
	{"meta-norecall", coherenceGuard},
}

// TestControls runs each guard, a test of this package, with its mechanism off. A guard
// that passes without its mechanism guards nothing.
func TestControls(t *testing.T) {
	if !*controls {
		t.Log("only with -controls (make controls)")
		return
	}
	for _, c := range allControls {
		t.Run(c.name, func(t *testing.T) {
			err := c.guard(t, ControlEnv+"="+c.name)
			if err == nil {
				t.Fatalf("with %s the guarding test stays green", c.name)
			}
			first, _, _ := strings.Cut(err.Error(), "\n")
			t.Logf("red, as it must be: %s", first)
		})
	}
}

// TestUnitControls does the same with the tests of other packages. Each test must pass
// without the control, and with the control must fail by its own checks, not by a broken
// build.
func TestUnitControls(t *testing.T) {
	if !*controls {
		t.Log("only with -controls (make controls)")
		return
	}
	green := map[string]bool{} // guards that were seen green without any control
	for _, c := range unitControls {
		t.Run(c.name+"/"+c.guard, func(t *testing.T) {
			run := func(env string) (string, error) {
				cmd := exec.CommandContext(t.Context(), "go", "test", "-count", "1", "-timeout", "10m", "-run", "^"+c.guard+"$", "penstock.io/penstock/"+c.pkg)
				cmd.Env = append(os.Environ(), "CGO_ENABLED=0", env)
				out, err := cmd.CombinedOutput()
				return string(out), err
			}
			if guard := c.pkg + " " + c.guard; !green[guard] {
				if out, err := run(ControlEnv + "="); err != nil || strings.Contains(out, "no tests to run") {
					t.Fatalf("without the control: %v\n%s", err, out)
				}
				green[guard] = true
			}
			out, err := run(ControlEnv + "=" + c.name)
			if err == nil {
				t.Fatalf("with %s, %s stays green", c.name, c.guard)
			}
			if !strings.Contains(out, "--- FAIL: "+c.guard) {
				t.Fatalf("with %s, %s is not red but broken: %v\n%s", c.name, c.guard, err, out)
			}
		})
	}
}

func powerGuard(t *testing.T, env string) error {
	m := machineOf(t, 512<<20, 512<<20)
	m.env = []string{env}
	return m.powerRounds(t.Context(), controlRounds, *seed, t.Logf)
}

func flipGuard(t *testing.T, env string) error {
	s := newSystem(t)
	if err := s.prepareFlips(t.Context()); err != nil {
		t.Fatal(err)
	}
	s.env = []string{env}
	d := damaged[0]
	_, err := s.flip(t.Context(), controlRounds, *seed, d.folder, d.match)
	return err
}

func coherenceGuard(t *testing.T, env string) error {
	s := newSystem(t)
	s.env = []string{env}
	return s.twoMounts(t.Context(), 500, *seed)
}

// TestTwoMounts: a change on one mount is visible on the other mount as soon as the
// system call returns.
func TestTwoMounts(t *testing.T) {
	if err := newSystem(t).twoMounts(t.Context(), few(5)*100, *seed); err != nil {
		t.Fatal(err)
	}
}
