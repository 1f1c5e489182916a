package verbstest

var accessTests, endingTests, resourceTests []conformanceTest
