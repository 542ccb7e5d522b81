package local

import (
	"log/slog"
	"strings"

	"penstock.io/penstock/meta"
)

// ControlVariable names the environment variable with the safety mechanisms to switch off,
// separated by commas. Only 'make controls' sets the variable, to prove that the tests detect
// the loss of each mechanism.
const ControlVariable = "PENSTOCK_CONTROL"

// Controls parses the value of ControlVariable. Errors: Invalid (an unknown name).
func Controls(value string, log *slog.Logger) (u Unsafe, err error) {
	for name := range strings.SplitSeq(value, ",") {
		switch name {
		case "":
			continue
		case "chunk-nosync":
			u.Store.UnsafeNoSync = true
		case "chunk-noverify":
			u.Store.UnsafeNoVerify = true
		case "chunk-nofence":
			u.Store.UnsafeNoFence = true
		case "chunk-nocap":
			u.NoCap = true
		case "chunk-ownclock":
			u.OwnClock = true
		case "journal-nosync":
			u.NoJournal = true
		case "journal-nofence":
			u.Meta.NoFence = true
		case "client-nolaunder":
			u.NoLaunder = true
		case "meta-norecall":
			u.Meta.NoRecall = true
		case "meta-nowait":
			u.Meta.NoWait = true
		case "meta-noputin":
			u.Meta.NoPutIn = true
		case "meta-nolease":
			u.Meta.NoLease = true
		case "meta-norevoke":
			u.Meta.NoRevoke = true
		case "meta-nosquash":
			u.Meta.NoSquash = true
		case "meta-nostreams":
			u.Meta.NoStreams = true
		case "meta-nopromise":
			u.Meta.NoPromise = true
		case "meta-nofreeze":
			u.Meta.NoFreeze = true
		case "meta-noend":
			u.Meta.NoEnd = true
		case "meta-noleast":
			u.Meta.NoLeast = true
		case "meta-nocheckpointage":
			u.Meta.NoCheckpointAge = true
		case "mount-nodrain":
			u.NoDrain = true
		case "mount-noack":
			u.Lines.NoAck = true
		case "mount-newnames":
			u.Lines.NewNames = true
		case "meta-nocourtesy":
			u.Meta.NoCourtesy = true
		case "meta-noreplaycheck":
			u.Meta.NoReplayCheck = true
		case "meta-nomeet":
			u.Meta.NoMeet = true
		case "meta-notellpolicy":
			u.Meta.NoTellPolicy = true
		case "meta-nolosswait":
			u.Meta.NoLossWait = true
		case "meta-noleadership":
			u.Meta.NoLeadership = true
		case "meta-norules":
			u.Meta.NoRules = true
		case "stream-nosync":
			u.Streams.NoSync = true
		case "stream-noepoch":
			u.Streams.NoEpoch = true
		case "stream-noseal":
			u.Streams.NoSeal = true
		case "stream-nofence":
			u.Streams.NoFence = true
		case "stream-nooffsets":
			u.Streams.NoOffsets = true
		case "stream-norights":
			u.Streams.NoRights = true
		case "stream-nolate":
			u.Streams.NoLate = true
		case "stream-noend":
			u.Streams.NoEnd = true
		case "mirror-nodigest":
			u.Mirrors.NoDigest = true
		default:
			return u, meta.E("control", meta.Invalid, name, nil)
		}
		log.Error("UNSAFE: a safety mechanism is switched off by "+ControlVariable, "mechanism", name)
	}
	return u, nil
}
