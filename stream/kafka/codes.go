package kafka

import (
	"errors"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/stream/group"
	"penstock.io/penstock/stream/log"
	"penstock.io/penstock/stream/partition"
)

// Error codes of the protocol.
const (
	codeUnknown                 int16 = -1
	codeOK                      int16 = 0
	codeOffsetOutOfRange        int16 = 1
	codeCorruptMessage          int16 = 2
	codeUnknownTopic            int16 = 3
	codeLeaderNotAvailable      int16 = 5
	codeNotLeader               int16 = 6
	codeTimedOut                int16 = 7
	codeMessageTooLarge         int16 = 10
	codeMetadataTooLarge        int16 = 12
	codeCoordinatorLoading      int16 = 14
	codeCoordinatorNotAvailable int16 = 15
	codeNotCoordinator          int16 = 16
	codeInvalidTopic            int16 = 17
	codeInvalidAcks             int16 = 21
	codeIllegalGeneration       int16 = 22
	codeInconsistent            int16 = 23
	codeInvalidGroup            int16 = 24
	codeUnknownMember           int16 = 25
	codeInvalidSession          int16 = 26
	codeRebalance               int16 = 27
	codeTopicDenied             int16 = 29
	codeGroupDenied             int16 = 30
	codeMechanism               int16 = 33
	codeLoginState              int16 = 34
	codeUnsupportedVersion      int16 = 35
	codeTopicExists             int16 = 36
	codeInvalidPartitions       int16 = 37
	codeInvalidConfig           int16 = 40
	codeInvalidRequest          int16 = 42
	codeUnsupportedFormat       int16 = 43
	codeOutOfOrder              int16 = 45
	codeInvalidProducer         int16 = 47
	codeTransactionDenied       int16 = 53
	codeStorage                 int16 = 56
	codeLoginFailed             int16 = 58
	codeNonEmptyGroup           int16 = 68
	codeGroupNotFound           int16 = 69
	codeSessionNotFound         int16 = 70
	codeFencedLeader            int16 = 74
	codeUnknownLeader           int16 = 75
	codeMemberIDRequired        int16 = 79
	codeGroupMaxSize            int16 = 81
	codeFencedInstance          int16 = 82
	codeInvalidRecord           int16 = 87
	codeUnknownTopicID          int16 = 100
)

// refusal is an error with its code.
type refusal struct {
	code int16
	text string
}

// Error returns the text.
func (r *refusal) Error() string { return r.text }

// codeOf translates an error of a stream or partition.
func codeOf(err error) int16 {
	if err == nil {
		return codeOK
	}
	if r, ok := errors.AsType[*refusal](err); ok {
		return r.code
	}
	if q, ok := errors.AsType[*partition.SequenceError](err); ok {
		if q.Verdict == log.Fenced {
			return codeInvalidProducer
		}
		return codeOutOfOrder
	}
	switch meta.KindOf(err) {
	case meta.NotFound:
		return codeUnknownTopic
	case meta.Invalid, meta.NameTooLong:
		return codeInvalidTopic
	case meta.Range:
		return codeOffsetOutOfRange
	case meta.TooBig:
		return codeMessageTooLarge
	case meta.Exists, meta.NotEmpty:
		return codeTopicExists
	case meta.AccessDenied, meta.ReadOnly:
		return codeTopicDenied
	case meta.Fenced, meta.Unavailable, meta.SessionExpired, meta.Stale, meta.Canceled, meta.Interrupted, meta.NotOwner:
		return codeNotLeader
	case meta.Busy:
		return codeTimedOut
	case meta.NoSpace, meta.QuotaExceeded, meta.IO, meta.Corrupt, meta.Version:
		return codeStorage
	}
	return codeUnknown
}

// codeOfBatch translates an error of log.Admit.
func codeOfBatch(err error) int16 {
	switch meta.KindOf(err) {
	case meta.Corrupt:
		return codeCorruptMessage
	case meta.Invalid:
		return codeInvalidRecord
	case meta.Version:
		return codeUnsupportedFormat
	case meta.NotSupported:
		return codeTransactionDenied
	}
	return codeOf(err)
}

// codeOfGroup translates an outcome of the group's machine.
func codeOfGroup(c group.Code) int16 {
	switch c {
	case group.OK:
		return codeOK
	case group.NotCoordinator:
		return codeNotCoordinator
	case group.UnknownMember:
		return codeUnknownMember
	case group.IllegalGeneration:
		return codeIllegalGeneration
	case group.RebalanceInProgress:
		return codeRebalance
	case group.InconsistentProtocol:
		return codeInconsistent
	case group.MemberIDRequired:
		return codeMemberIDRequired
	case group.FencedInstance:
		return codeFencedInstance
	case group.GroupMaxSize:
		return codeGroupMaxSize
	case group.InvalidSessionTimeout:
		return codeInvalidSession
	}
	return codeUnknown
}
